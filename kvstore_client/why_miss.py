"""`kvstore why-miss`: which fields keep two engines, or two versions of one, from sharing blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from kvstore.errors import InvalidArgumentError
from kvstore.messages import DescribedNamespace
from kvstore.namespace import FieldDifference, differences
from kvstore_client.cli import asking, daemon_options

_ID_DIGITS = 16
_VALUE_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A namespace and the others, those that differ in the fewest fields first."""

    own: DescribedNamespace
    others: tuple[tuple[DescribedNamespace, tuple[FieldDifference, ...]], ...]


def compare(namespaces: Sequence[DescribedNamespace], *, id_prefix: str = "", count_max: int) -> list[Compared]:
    """Each namespace whose id begins so, beside up to `count_max` of the others."""
    found = []
    for own in namespaces:
        if not own.namespace.id.hex().startswith(id_prefix):
            continue
        others = [(other, differences(own.namespace, other.namespace)) for other in namespaces if other is not own]
        others.sort(key=lambda pair: (len(pair[1]), -pair[0].block_count))
        found.append(Compared(own=own, others=tuple(others[:count_max])))
    return found


@click.command("why-miss")
@click.option(
    "--namespace", "id_prefix", default="", metavar="ID", help="Only this one; the first digits of its id do."
)
@click.option("--others", "count_max", default=1, show_default=True, help="With how many others each is compared.")
@daemon_options
def why_miss(address: str | None, *, id_prefix: str, count_max: int, is_json: bool, timeout_s: float) -> None:
    """Name what keeps namespaces from sharing blocks.

    Blocks are shared within a namespace only: engines whose models, weights, layouts, adapters, salts or settings
    differ never get each other's. Each namespace that the daemon knows is shown beside the one most like it, with the
    fields that differ.

    \b
    Examples:
      kvstore why-miss
      kvstore why-miss --namespace 3f9a --others 5
      kvstore why-miss --json | jq '.namespaces[].others[0].fields[].field'
    """
    with asking(address, timeout_s=timeout_s) as client:
        answer = client.namespaces()
    found = compare(answer.namespaces, id_prefix=id_prefix.lower(), count_max=count_max)
    if id_prefix and not found:
        known = ", ".join(one.namespace.id.hex()[:_ID_DIGITS] for one in answer.namespaces) or "none"
        raise InvalidArgumentError.of("--namespace", id_prefix, f"the id of one that the daemon knows: {known}")
    if is_json:
        shown = [_as_json(one) for one in found]
        click.echo(json.dumps({"namespaces": shown, "left_out_count": answer.left_out_count}))
        return
    click.echo("\n".join(_lines(found)))
    if answer.left_out_count:
        click.echo(f"{answer.left_out_count} more namespaces are not shown; name one with --namespace")


def _as_json(compared: Compared) -> dict[str, object]:
    return _named(compared.own) | {
        "others": [_named(other) | {"fields": [asdict(field) for field in fields]} for other, fields in compared.others]
    }


def _named(described: DescribedNamespace) -> dict[str, object]:
    namespace = described.namespace
    return {
        "namespace_id": namespace.id.hex(),
        "model": namespace.model,
        "block_count": described.block_count,
    }


def _lines(found: Sequence[Compared]) -> list[str]:
    if not found:
        return ["the daemon knows no namespace: no engine has asked it for anything since it started"]
    lines = []
    told = set[frozenset[bytes]]()
    for one in found:
        pairs = [frozenset({one.own.namespace.id, other.namespace.id}) for other, _ in one.others]
        others = [other for other, pair in zip(one.others, pairs, strict=True) if pair not in told]
        told.update(pairs)
        if one.others and not others:
            continue
        lines.append(_title(one.own))
        if not others:
            lines.append("  there is no other one")
        for other, fields in others:
            lines.append(f"  differs from {_title(other)} in")
            lines += [f"    {field.field}: {_cut(field.own)}, there {_cut(field.other)}" for field in fields]
    return lines


def _title(described: DescribedNamespace) -> str:
    namespace = described.namespace
    return f"{namespace.id.hex()[:_ID_DIGITS]} {namespace.model}, {described.block_count:,} blocks in memory"


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}…"

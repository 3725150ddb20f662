"""Writes docs/configuration.md and docs/metrics.md from the code that they describe; `--check` only compares."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import annotated_types
import click
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from gpu_agent.config import AgentConfig
from gpu_agent.metrics import METRICS
from kvstore_client.config import ClientConfig
from kvstore_server.cli import serve
from kvstore_server.config import ENV_DELIMITER, ENV_PREFIX, Config
from kvstore_server.obs.metrics import SPECS

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py from the code: change it there, then run `make docs`. -->"
CONFIGURATION = """\
{note}
# Configuration

## Daemon

`kvstore serve` needs no configuration. What is set comes from, last wins: the defaults below, one YAML file
(`--config FILE` or `$KVSTORE_CONFIG`), environment variables, flags. `kvstore config` prints the result, and
its output is itself a valid file:

```yaml
memory:
  capacity: 64GiB
grpc:
  port: 7450
```

A size is a number of bytes, or one with a unit: `512MiB`, `8GiB`, `1000000`. An unknown setting in the file, or in
a variable of a known section, is an error; other variables that look like settings are warned about.
{daemon}

## Client

Fields of `kvstore_client.ClientConfig`, for `Client(config=...)` and `AsyncClient(config=...)`. Which daemon a
client uses, first that is given or answers: its `address` argument, `$KVSTORE_ADDRESS`, this node's unix socket,
`127.0.0.1:7450`.

{client}

## Agent

Fields of `gpu_agent.AgentConfig`.

{agent}
"""
METRICS_PAGE = """\
{note}
# Metrics

In Prometheus' text format. The daemon serves its own at `/metrics` of `metrics.host`:`metrics.port`
(default `127.0.0.1:7451`). `kvstore agent` serves the agent's at `/metrics` of `127.0.0.1:7453` (`--metrics-port`).
An agent inside an engine serves nothing: `gpu_agent.metrics.agent_registry(agent.snapshot)`
is a registry for the engine to serve, apart from its own.

## Daemon

{store}

`kvstore_store_build_info` has the daemon's version as its label `version`.

## Agent

{agent}
"""
BOUNDS: dict[type, tuple[str, str]] = {
    annotated_types.Ge: ("at least", "ge"),
    annotated_types.Gt: ("above", "gt"),
    annotated_types.Le: ("at most", "le"),
    annotated_types.Lt: ("below", "lt"),
}
KINDS = {ByteSize: "size", bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}


def configuration() -> str:
    return CONFIGURATION.format(
        note=NOTE,
        daemon="\n".join(daemon_sections()),
        client="\n".join(dataclass_table(ClientConfig)),
        agent="\n".join(dataclass_table(AgentConfig)),
    )


def metrics() -> str:
    store = [(spec.name, spec.labels, spec.help) for spec in SPECS]
    agent = [(spec.name, (spec.label,) if spec.label else (), spec.help) for spec in METRICS]
    return METRICS_PAGE.format(note=NOTE, store="\n".join(metric_table(store)), agent="\n".join(metric_table(agent)))


def daemon_sections() -> Iterator[str]:
    flags = {option.name: option.opts[0] for option in serve.params if isinstance(option, click.Option) and option.name}
    for section, info in Config.model_fields.items():
        yield from ("", f"### {section}", "", str(info.description), "")
        if typing.get_origin(info.annotation) is tuple:
            yield from list_section(section, typing.get_args(info.annotation)[0])
            continue
        model = info.annotation
        assert isinstance(model, type), f"{section} is {model!r}"
        assert issubclass(model, BaseModel), f"{section} is no section"
        rows = []
        for name, field in model.model_fields.items():
            variable = f"{ENV_PREFIX}{section}{ENV_DELIMITER}{name}".upper()
            flag = flags.get(f"{section}__{name}")
            ways = f"`{variable}`" + (f"<br>`{flag}`" if flag else "")
            rows.append((f"`{section}.{name}`", ways, allowed(field), default_of(field), one_line(field.description)))
        yield from table("setting", "variable, flag", "allowed", "default", "meaning", rows=rows)


def list_section(section: str, model: type[BaseModel]) -> Iterator[str]:
    """A section that is a list: in a variable it is JSON."""
    rows = [
        (f"`{section}[].{name}`", allowed(field), default_of(field), one_line(field.description))
        for name, field in model.model_fields.items()
    ]
    yield from table("setting", "allowed", "default", "meaning", rows=rows)
    yield from ("", f"A list; as the variable `{ENV_PREFIX}{section.upper()}` it is one of JSON objects.")


def allowed(field: FieldInfo) -> str:
    return values_of(field.annotation, field.metadata)


def values_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """In words, what may stand for a type."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(values_of(part, metadata) for part in parts if part is not type(None))
    if origin is typing.Annotated:
        inner = [part for one in annotation.__metadata__ if isinstance(one, FieldInfo) for part in one.metadata]
        return values_of(parts[0], inner)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin is tuple:
        return f"list of: {values_of(parts[0])}"
    bounds = [
        f"{words} {shown(getattr(bound, attribute))}"
        for bound in metadata
        for kind, (words, attribute) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([KINDS[annotation], *bounds])


def shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def default_of(field: FieldInfo) -> str:
    """A computed default differs between machines, so it is described, not shown."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "by machine"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return "none" if field.default is None else f"`{field.default}`"


def dataclass_table(kind: type) -> list[str]:
    texts = attribute_docstrings(kind)
    rows = [
        (
            f"`{field.name}`",
            "required" if field.default is dataclasses.MISSING else f"`{field.default}`",
            one_line(texts[field.name]),
        )
        for field in dataclasses.fields(kind)
    ]
    return table("field", "default", "meaning", rows=rows)


def attribute_docstrings(kind: type) -> dict[str, str]:
    """The strings below the fields of a dataclass."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef), f"{kind} is no class"
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id} says nothing"
            texts[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def metric_table(specs: Iterable[tuple[str, Iterable[str], str]]) -> list[str]:
    rows = []
    for name, labels, text in specs:
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append((f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), text))
    return table("metric", "type", "labels", "meaning", rows=rows)


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a page is not what the code says")
    options = parser.parse_args()
    stale = []
    for name, page in (("configuration.md", configuration()), ("metrics.md", metrics())):
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == page:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(page, encoding="utf-8")
            print(f"docs/{name} written")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

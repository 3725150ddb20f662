"""`kvstore plan`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import click

from kvstore.errors import CapacityError, InvalidArgumentError
from kvstore_client.sizes import format_size, parse_size
from kvstore_server.plan.advice import warnings
from kvstore_server.plan.arithmetic import Demand, Machine, make_plan, usable_gpu_bytes
from kvstore_server.plan.dtypes import element_bytes, parse_dtype
from kvstore_server.plan.model_config import read_model
from kvstore_server.plan.models import MODELS, Model, find_model, full
from kvstore_server.plan.report import Assumed, Report, as_json, as_lines, model_table
from kvstore_server.plan.shape import PARALLEL_MAX, CacheShape, check_tensor_parallel, fewest_gpus
from kvstore_server.plan.tiers import MEMORY_BYTES_MIN, NVME_BYTES_MIN, DaemonSizes

_TOKENS_MAX = 1 << 30
_COUNT_MAX = 1 << 30
_DIM_MAX = 1 << 20
_LAYERS_MAX = 1 << 12
_BLOCK_TOKENS_MAX = 1 << 16
_SIZE_MAX = 1 << 60
_GPU_BYTES_MIN = 1 << 30
_WEIGHTS_BYTES_MIN = 1 << 20
"""Below these a number without its unit is meant."""
_SPEED_MAX = 1e6
_TFLOPS_MAX = 1e6
_RATE_MAX = 1e12
_STEP_MS_MAX = 3.6e6

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE | re.ASCII)
_TOKENS_POWERS = {"": 0, "k": 1, "m": 2}
_PARAMS = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE | re.ASCII)
_PARAMS_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}

_DTYPE = "bfloat16"
_WEIGHT_BYTES = 2
_GIGA = 1e9
_GPUS_DEFAULT = "as many as the weights need, 1 if --pp or --gpu-memory is given"

_DEFAULTS = {
    "--context": ("8192", "tokens of each sequence, prompt and answer"),
    "--concurrency": ("32", "sequences whose cache is to be kept"),
    "--hit-rate": ("0.5", "half of a sequence's tokens were computed before"),
    "--gpu-memory": ("80GiB", "of each GPU"),
    "--gpu-share": ("0.9", "of it for weights and KV; the rest for activations and the driver"),
    "--link": ("25", "GB/s between host memory and a GPU, what PCIe 4.0 x16 gives"),
    "--disk": ("3", "GB/s of one NVMe drive, reads and writes mixed"),
    "--step-ms": ("25", "of decoding one token"),
    "--block-tokens": ("16", "vLLM's block size on GPUs"),
    "--gpu-tflops": ("400", "that prefill reaches, 40 % of an H100's in bf16"),
}
"""What is assumed where nothing is said; each one is shown with the plan."""


_Command = Callable[..., None]


def _option(flag: str, metavar: str, text: str) -> Callable[[_Command], _Command]:
    shown = f"  [default: {_DEFAULTS[flag][0]}]" if flag in _DEFAULTS else ""
    return click.option(flag, metavar=metavar, help=text + shown)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="[MODEL]", required=False)
@_option("--model", "NAME", "A model of the table, such as llama-3-8b; the same as MODEL.")
@_option("--config", "FILE", "A model's config.json, or its folder, as on Hugging Face.")
@_option("--layers", "COUNT", "Layers of a model that is described here, with --heads and --head-dim.")
@_option("--heads", "COUNT", "Its attention heads.")
@_option("--kv-heads", "COUNT", "Its KV heads.  [default: as many as --heads]")
@_option("--head-dim", "COUNT", "Elements of a head.")
@_option("--dtype", "DTYPE", "Of the KV cache, such as bf16, fp16, fp8.  [default: the model's]")
@_option("--params", "COUNT", "Its parameters, such as 8B; weights are then two bytes each.")
@_option("--active-params", "COUNT", "Those that work on each token, for mixtures of experts.  [default: --params]")
@_option("--weights-bytes", "SIZE", "What its weights take on all GPUs together.")
@_option("--context", "TOKENS", "Tokens of a sequence, prompt and answer, such as 8192 or 8K.")
@_option("--concurrency", "COUNT", "Sequences whose cache is to be there when they go on.")
@_option("--hit-rate", "SHARE", "Share of a sequence's tokens that were computed before.")
@_option("--gpu-memory", "SIZE", "Memory of each GPU.")
@_option("--gpu-share", "SHARE", "Share of it for weights and KV cache.")
@click.option("--tp", metavar="COUNT", type=click.IntRange(1, PARALLEL_MAX),
              help=f"Tensor parallel GPUs.  [default: {_GPUS_DEFAULT}]")  # fmt: skip
@click.option("--pp", metavar="COUNT", type=click.IntRange(1, PARALLEL_MAX), help="Pipeline stages, likewise.")
@_option("--vram-window", "TOKENS", "Tokens of each sequence to keep in VRAM.  [default: as many as fit]")
@_option("--memory", "SIZE", "Capacity of the memory tier.  [default: as much as is needed]")
@_option("--nvme", "SIZE", "Capacity of the NVMe tier; 0 for none.  [default: as much as is needed]")
@_option("--link", "GB/S", "Between host memory and one GPU, each way, in 10^9 bytes per second.")
@_option("--disk", "GB/S", "Of the NVMe tier's disk.")
@_option("--step-ms", "MS", "Time in which one token of each sequence is decoded.")
@_option("--prefill-tokens-per-s", "RATE", "Of all GPUs.  [default: from --gpu-tflops and --active-params]")
@_option("--gpu-tflops", "TFLOPS", "What prefill reaches on each GPU.")
@_option("--requests-per-s", "RATE", "For the load on link and disk.  [default: what keeps prefill busy]")
@_option("--block-tokens", "TOKENS", "Tokens of a block.")
@click.option("--explain", is_flag=True, help="Show the formula of each number.")
@click.option("--list-models", is_flag=True, help="Show the table of models and where each row comes from.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def plan(
    name: str | None,
    *,
    tp: int | None,
    pp: int | None,
    explain: bool,
    list_models: bool,
    is_json: bool,
    **given: str,
) -> None:
    """Work out what each tier must hold for a model, and whether tiers pay.

    Needs no daemon, no GPU and no network. For one copy of the model on one
    node; whatever is not given is assumed, and the output says so. Exit code 1
    when the weights do not fit into the GPUs.

    \b
    Fields of --json, among others:
      bytes_per_token     all layers, all GPUs; copies on several GPUs once
      bytes_per_block     of one GPU's part
      bytes_per_sequence  of --context tokens; windows and states as needed
      tiers               of vram, memory and nvme: window_tokens and
                          window_bytes of each sequence, needed_bytes of all,
                          capacity_bytes to configure
      concurrency         sequences wanted, kept without_tiers, with_tiers
      times, traffic, watermarks, warnings, inputs, assumed

    \b
    Examples:
      kvstore plan llama-3-8b --context 32K --concurrency 200
      kvstore plan deepseek-v3 --tp 8 --gpu-memory 141GiB --memory 1TiB
      kvstore plan --config ./config.json --params 8B --explain
      kvstore plan --layers 80 --heads 64 --head-dim 128 --dtype fp16 --json
    """
    if list_models:
        _show_models(is_json=is_json)
        return
    report = _report(_Given(name, tp=tp, pp=pp, **given))
    if is_json:
        click.echo(json.dumps(as_json(report, with_formulas=explain)))
    else:
        click.echo("\n".join(as_lines(report, with_formulas=explain)))


def _show_models(*, is_json: bool) -> None:
    bytes_per_token = {name: _shape(model, model.dtype).token_bytes for name, model in MODELS.items()}
    if is_json:
        shown = {
            name: {"bytes_per_token": bytes_per_token[name], "source": model.source} for name, model in MODELS.items()
        }
        click.echo(json.dumps(shown))
    else:
        click.echo("\n".join(model_table(MODELS, bytes_per_token=bytes_per_token)))


def _shape(model: Model, dtype: str) -> CacheShape:
    return CacheShape(layers=model.layers, element_bytes=element_bytes(dtype))


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


class _Given:
    """The flags as they were written; whatever is read and was not given is noted as assumed."""

    def __init__(self, name: str | None, *, tp: int | None, pp: int | None, **given: str | None) -> None:
        if name is not None and given["model"] is not None:
            raise InvalidArgumentError.of("--model", given["model"], f"one model; MODEL is {name!r} already")
        self._given = {**given, "model": given["model"] if name is None else name}
        self.tp = tp
        self.pp = pp
        self.assumed: list[Assumed] = []

    def text(self, flag: str) -> str | None:
        """As given, else the default, else None."""
        value = self._given[_name(flag)]
        if value is None and flag in _DEFAULTS:
            value, why = _DEFAULTS[flag]
            self.assume(flag, value, why)
        return value

    def has(self, flag: str) -> bool:
        """Whether it was given."""
        return {"--tp": self.tp, "--pp": self.pp}.get(flag) is not None or self._given.get(_name(flag)) is not None

    def assume(self, flag: str, value: str, why: str) -> None:
        self.assumed.append(Assumed(flag, value, why))

    def size(self, flag: str, *, at_least: int, zero_is_none: bool = False) -> int | None:
        text = self.text(flag)
        if text is None:
            return None
        size_bytes = parse_size(text, field=flag)
        if (size_bytes == 0 and zero_is_none) or at_least <= size_bytes <= _SIZE_MAX:
            return size_bytes
        allowed = f"{format_size(at_least)} to {format_size(_SIZE_MAX)}"
        if zero_is_none:
            allowed = f"0 for none, or {allowed}"
        bare = text.strip()
        if re.fullmatch(r"[\d.]*[1-9][\d.]*", bare, re.ASCII):
            allowed = f"{allowed}; without a unit it is bytes: is {bare}GiB meant?"
        raise InvalidArgumentError.of(flag, text, allowed)

    def whole(self, flag: str, *, at_most: int) -> int | None:
        text = self.text(flag)
        if text is None:
            return None
        if not re.fullmatch(r"\d{1,19}", text.strip(), re.ASCII) or not 1 <= int(text) <= at_most:
            raise InvalidArgumentError.of(flag, text, f"a whole number from 1 to {at_most}")
        return int(text)

    def tokens(self, flag: str, *, at_most: int) -> int | None:
        text = self.text(flag)
        if text is None:
            return None
        match = _TOKENS.fullmatch(text.strip())
        count = Decimal(0) if match is None else Decimal(match[1]) * 1024 ** _TOKENS_POWERS[match[2].lower()]
        if not 1 <= count <= at_most or count != int(count):
            raise InvalidArgumentError.of(flag, text, f"1 to {at_most} tokens, such as 8192 or 8K, which is the same")
        return int(count)

    def params(self, flag: str) -> float | None:
        text = self.text(flag)
        if text is None:
            return None
        match = _PARAMS.fullmatch(text.strip())
        count = 0.0 if match is None else float(match[1]) * 1000.0 ** _PARAMS_POWERS[match[2].lower()]
        if not 1 <= count <= 1e16:
            raise InvalidArgumentError.of(flag, text, "a number of parameters up to 10000T, such as 8B or 70.6B")
        return count

    def number(self, flag: str, *, at_most: float, allows_zero: bool = False) -> float | None:
        text = self.text(flag)
        if text is None:
            return None
        allowed = f"{'0' if allows_zero else 'above 0'} to {at_most:g}"
        try:
            value = float(text)
        except ValueError:
            raise InvalidArgumentError.of(flag, text, f"a number, {allowed}") from None
        if not math.isfinite(value) or not 0 <= value <= at_most or (value == 0 and not allows_zero):
            raise InvalidArgumentError.of(flag, text, f"a number, {allowed}")
        return value


_Value = TypeVar("_Value")


def _known(value: _Value | None) -> _Value:
    assert value is not None, f"{value} for a flag that has a default"
    return value


def _report(given: _Given) -> Report:
    model = _model(given)
    dtype_text = given.text("--dtype")
    dtype = model.dtype if dtype_text is None else parse_dtype(dtype_text, field="--dtype")
    shape = _shape(model, dtype)
    weights_bytes, active_params = _weights(given, model)
    machine = _machine(given, model, shape, weights_bytes=weights_bytes)
    _check_weights(machine)
    demand = _demand(given, active_params=active_params, gpu_count=machine.gpu_count)
    made = make_plan(shape, demand, machine, sizes=_daemon_sizes())
    return Report(
        model=model,
        shape=shape,
        dtype=dtype,
        demand=demand,
        machine=machine,
        plan=made,
        warnings=warnings(shape, demand, machine, made),
        assumed=given.assumed,
    )


_DESCRIBED = ("--heads", "--kv-heads", "--head-dim")


def _model(given: _Given) -> Model:
    ways = {flag: given.text(flag) for flag in ("--model", "--config", "--layers")}
    used = [flag for flag, value in ways.items() if value is not None]
    if not used:
        allowed = "--model NAME, --config FILE, or --layers, --heads and --head-dim"
        raise InvalidArgumentError(f"no model is given; allowed: {allowed}. `kvstore plan --list-models` shows names")
    if len(used) > 1:
        raise InvalidArgumentError.of(used[1], ways[used[1]], f"none beside {used[0]}: one model")
    if used != ["--layers"]:
        for flag in _DESCRIBED:
            if given.text(flag) is not None:
                raise InvalidArgumentError.of(flag, given.text(flag), f"none beside {used[0]}, only with --layers")
    if ways["--model"] is not None:
        return find_model(ways["--model"])
    if ways["--config"] is not None:
        return _read_config(Path(ways["--config"]))
    return _described_model(given)


def _described_model(given: _Given) -> Model:
    layers = given.whole("--layers", at_most=_LAYERS_MAX)
    heads = given.whole("--heads", at_most=_DIM_MAX)
    head_dim = given.whole("--head-dim", at_most=_DIM_MAX)
    kv_heads = given.whole("--kv-heads", at_most=_DIM_MAX)
    if heads is None and kv_heads is None:
        raise InvalidArgumentError(f"--heads is missing; allowed with --layers: a whole number from 1 to {_DIM_MAX}")
    if head_dim is None:
        raise InvalidArgumentError(f"--head-dim is missing; allowed with --layers: a whole number from 1 to {_DIM_MAX}")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise InvalidArgumentError.of("--kv-heads", kv_heads, f"a divisor of --heads, {heads}")
    if given.text("--dtype") is None:
        given.assume("--dtype", _DTYPE, "of the KV cache")
    used_kv_heads = kv_heads or heads
    assert layers is not None, "asked for by --layers"
    assert used_kv_heads is not None, "one of them was given"
    return Model(
        name="described",
        layers=full(layers=layers, kv_heads=used_kv_heads, head_dim=head_dim),
        num_heads=heads,
        dtype=_DTYPE,
    )


def _read_config(path: Path) -> Model:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError.of("--config", str(path), "a readable config.json, or a folder with one") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidArgumentError.of("--config", str(path), f"JSON; this is not: {error}") from error
    return read_model(config, name=str(path))


def _weights(given: _Given, model: Model) -> tuple[int | None, float | None]:
    """Bytes of all weights, and parameters that work on each token."""
    params, active_params = given.params("--params"), given.params("--active-params")
    weights_bytes = given.size("--weights-bytes", at_least=_WEIGHTS_BYTES_MIN)
    if active_params is None:
        active_params = model.active_params if params is None else params
    if weights_bytes is None and params is not None:
        weights_bytes = round(params * _WEIGHT_BYTES)
        given.assume("--weights-bytes", format_size(weights_bytes), f"{_WEIGHT_BYTES} bytes for each parameter")
    if weights_bytes is None and model.weights_bytes is not None:
        weights_bytes = model.weights_bytes
        given.assume("--weights-bytes", format_size(weights_bytes), "the model as it is published")
    return weights_bytes, active_params


def _machine(given: _Given, model: Model, shape: CacheShape, *, weights_bytes: int | None) -> Machine:
    is_any_gpu_given = given.has("--tp") or given.has("--pp") or given.has("--gpu-memory")
    gpu_bytes = _known(given.size("--gpu-memory", at_least=_GPU_BYTES_MIN))
    gpu_share = _known(given.number("--gpu-share", at_most=1.0))
    tp, pp = given.tp or 1, given.pp or 1
    if not is_any_gpu_given and weights_bytes is not None:
        usable_bytes = usable_gpu_bytes(gpu_bytes, gpu_share)
        tp, pp = fewest_gpus(shape, num_heads=model.num_heads, weights_bytes=weights_bytes, usable_bytes=usable_bytes)
        if tp * pp > 1:
            why = f"the fewest GPUs that hold {format_size(weights_bytes)} of weights, each {format_size(usable_bytes)}"
            given.assume("--tp", str(tp), why)
            given.assume("--pp", str(pp), "likewise")
    check_tensor_parallel(shape, num_heads=model.num_heads, tp=tp)
    return Machine(
        tp=tp,
        pp=pp,
        gpu_bytes=gpu_bytes,
        gpu_share=gpu_share,
        weights_bytes=weights_bytes,
        vram_window_tokens=given.tokens("--vram-window", at_most=_TOKENS_MAX),
        memory_bytes=given.size("--memory", at_least=MEMORY_BYTES_MIN),
        nvme_bytes=given.size("--nvme", at_least=NVME_BYTES_MIN, zero_is_none=True),
        link_bytes_per_s=_known(given.number("--link", at_most=_SPEED_MAX)) * _GIGA,
        disk_bytes_per_s=_known(given.number("--disk", at_most=_SPEED_MAX)) * _GIGA,
        block_tokens=_known(given.tokens("--block-tokens", at_most=_BLOCK_TOKENS_MAX)),
    )


def _check_weights(machine: Machine) -> None:
    """Raises where no KV cache at all has room: there is nothing to plan then."""
    weights_bytes = machine.weights_bytes
    if weights_bytes is None or -(-weights_bytes // machine.gpu_count) <= machine.usable_bytes:
        return
    raise CapacityError(
        f"the weights do not fit: they take {format_size(-(-weights_bytes // machine.gpu_count))} of each GPU "
        f"({format_size(weights_bytes)} on {machine.gpu_count}), and of its {format_size(machine.gpu_bytes)} "
        f"{format_size(machine.usable_bytes)} are there for them and KV (--gpu-share {machine.gpu_share:g}); at least "
        f"{-(-weights_bytes // machine.usable_bytes)} such GPUs are needed (--tp, --pp), or larger ones "
        "(--gpu-memory), or smaller weights (--weights-bytes)"
    )


def _demand(given: _Given, *, active_params: float | None, gpu_count: int) -> Demand:
    return Demand(
        context_tokens=_known(given.tokens("--context", at_most=_TOKENS_MAX)),
        sequence_count=_known(given.whole("--concurrency", at_most=_COUNT_MAX)),
        hit_rate=_known(given.number("--hit-rate", at_most=1.0, allows_zero=True)),
        step_s=_known(given.number("--step-ms", at_most=_STEP_MS_MAX)) / 1e3,
        prefill_tokens_per_s=_prefill_tokens_per_s(given, active_params=active_params, gpu_count=gpu_count),
        requests_per_s=given.number("--requests-per-s", at_most=_RATE_MAX),
    )


def _prefill_tokens_per_s(given: _Given, *, active_params: float | None, gpu_count: int) -> float | None:
    tokens_per_s = given.number("--prefill-tokens-per-s", at_most=_RATE_MAX)
    if tokens_per_s is not None:
        return tokens_per_s
    if active_params is None:
        given.assume("--prefill-tokens-per-s", "unknown", "give it, or --params, to compare loads with recomputing")
        return None
    tflops = _known(given.number("--gpu-tflops", at_most=_TFLOPS_MAX))
    # Two operations for each parameter and token; what attention adds with the context is left out.
    tokens_per_s = gpu_count * tflops * 1e12 / (2.0 * active_params)
    given.assume("--prefill-tokens-per-s", f"{tokens_per_s:.0f}", "GPUs * --gpu-tflops / (2 * active parameters)")
    return tokens_per_s


def _daemon_sizes() -> DaemonSizes:
    from kvstore_server.config import NvmeConfig, default_slab_bytes

    def segments(capacity_bytes: int) -> tuple[int, int]:
        tier = NvmeConfig.model_validate({"path": "/", "capacity": capacity_bytes})
        return tier.segment_bytes, tier.segment_count

    return DaemonSizes(slab_bytes=default_slab_bytes, segments=segments)

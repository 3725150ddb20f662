"""Rules about the sources that no linter checks for us."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kvstore": ROOT / "proto" / "kvstore",
    "kvstore_client": ROOT / "kvstore_client",
    "kvstore_server": ROOT / "kvstore_server",
    "gpu_agent": ROOT / "gpu_agent",
}
# Each can run code that its input brings along.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    paths = [path for path in sorted(PACKAGES[package].rglob("*.py")) if not path.name.endswith("_pb2.py")]
    assert paths
    for path in paths:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_can_run_code_that_arrives_as_data(package: str) -> None:
    found = []
    for path, tree in sources(package):
        for node in ast.walk(tree):
            names = imported_modules(node)
            if isinstance(node, ast.Call):
                names.append(ast.unparse(node.func))
                if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                    names.append("pickle")
            found += [
                f"{path}:{node.lineno} {name}"
                for name in names
                if name in UNSAFE_CALLS or name.partition(".")[0] in UNSAFE_MODULES
            ]
    assert found == []


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_any_exception_is_caught_only_where_it_becomes_an_answer() -> None:
    """Where an RPC becomes a status, one place for each transport; where a fault of ours beside an engine
    is told and costs a miss instead of the engine. What catches everything, tidies up and
    raises again is no catch."""
    found = {
        str(path)
        for package in PACKAGES
        for path, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node) and not raises_again(node)
    }
    assert found == {
        "kvstore_client/integrations/vllm/lookups.py",
        "kvstore_client/integrations/vllm/worker.py",
        "kvstore_server/rpc/bulk_server.py",
        "kvstore_server/rpc/grpc_server.py",
        "kvstore_server/rpc/slab_calls.py",
        "gpu_agent/rpc.py",
    }


def test_the_daemon_and_the_client_load_no_torch() -> None:
    program = (
        "import sys, kvstore_server, kvstore_client, kvstore_client.cli\n"
        "import kvstore_server.cli, kvstore_server.daemon\n"
        "print([name for name in ('torch', 'transformers', 'gpu_agent', 'gguf') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n"


def test_the_contract_loads_nothing_that_an_engine_may_not_have() -> None:
    program = (
        "import sys, kvstore.keys, kvstore.namespace, kvstore.frames, kvstore.eviction\n"
        "print([name for name in ('google', 'grpc', 'numpy', 'torch') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n"


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_the_lowest_allowed_protobuf_can_load_the_committed_stubs() -> None:
    """A runtime older than the compiler refuses its stubs at import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (floor,) = [
        found[1] for line in project["dependencies"] if (found := re.fullmatch(r"protobuf>=([\d.]+)(,.*)?", line))
    ]
    for path in PACKAGES["kvstore"].rglob("*_pb2.py"):
        compiler = re.search(r"^# Protobuf Python Version: ([\d.]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert compiler is not None, f"{path} names no version"
        assert version_of(floor) >= version_of(compiler[1])


@pytest.mark.parametrize("tool", ["grpcio-tools", "import-linter", "mypy", "ruff"])
def test_a_tool_whose_verdict_is_a_gate_is_pinned(tool: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [line for line in project["optional-dependencies"]["dev"] if line.startswith(f"{tool}==")]

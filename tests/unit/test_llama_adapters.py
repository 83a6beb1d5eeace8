"""LoRA adapters: which files are refused and why, and that one changes the answer as far as its scale says."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.adapters import Adapters, check_adapters
from infervisor.worker.engines.llama.library import NativeLog, load_library
from infervisor.worker.engines.llama.loading import load_context, load_model
from infervisor.worker.engines.llama.model_file import ModelFile, check_model_file
from infervisor.worker.engines.llama.options import LlamaOptions, Lora
from tests.helpers.adapters import build_adapter
from tests.helpers.models import LOOP, TOKEN, VOCABULARY, build_model

A, B, C = TOKEN["a"], TOKEN["b"], TOKEN["c"]
"""The model says b after a."""


@dataclass
class Loaded:
    """A native model. `next_after` makes a context with adapters and asks it once."""

    llama: Any
    log: NativeLog
    file: ModelFile
    model: Any

    def adapters(self, *given: Lora) -> Adapters:
        return Adapters.load(self.llama, self.log, self.model, check_adapters(given, self.file))

    def next_after(self, token: int, adapters: Adapters) -> int:
        context = load_context(self.llama, self.log, self.model, LlamaOptions(threads=1, slots=1), 256)
        try:
            adapters.attach(context)
            tokens = (ctypes.c_int32 * 1)(token)
            assert self.llama.llama_decode(context, self.llama.llama_batch_get_one(tokens, 1)) == 0
            logits = self.llama.llama_get_logits_ith(context, -1)
            return int(np.ctypeslib.as_array(logits, (len(VOCABULARY),)).argmax())
        finally:
            self.llama.llama_free(context)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    llama, log = load_library()
    file = check_model_file(str(build_model(tmp_path_factory.mktemp("model") / "loop.gguf", LOOP)))
    model = load_model(llama, log, file, LlamaOptions(), lambda _phase, _fraction: None)
    yield Loaded(llama, log, file, model)
    llama.llama_model_free(model)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(build_adapter(tmp_path / "c after a.gguf", {A: C}))


# --- what it computes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "expected"), [(1.0, C), (0.0, B), (-1.0, B)])
def test_an_adapter_counts_as_its_scale_says(loaded: Loaded, path: str, scale: float, expected: int) -> None:
    adapters = loaded.adapters(Lora(path, scale))
    assert loaded.next_after(A, adapters) == expected
    assert loaded.next_after(B, adapters) == C, "what the adapter doesn't know stays"
    adapters.close()
    adapters.close()
    assert loaded.next_after(A, loaded.adapters()) == B


def test_several_adapters_add_up(loaded: Loaded, path: str, tmp_path: Path) -> None:
    stronger = str(build_adapter(tmp_path / "a after a.gguf", {A: A}, strength=30))
    adapters = loaded.adapters(Lora(path), Lora(stronger))
    assert loaded.next_after(A, adapters) == A
    adapters.close()
    adapters = loaded.adapters(Lora(path), Lora(stronger, 0.1))
    assert loaded.next_after(A, adapters) == C
    adapters.close()


def test_facts_and_marks_tell_adapters_apart(loaded: Loaded, path: str, tmp_path: Path) -> None:
    def marks(*given: Lora) -> tuple[str, ...]:
        adapters = loaded.adapters(*given)
        adapters.close()
        return adapters.marks

    adapters = loaded.adapters(Lora(path, 0.5))
    adapters.close()
    assert adapters.facts == [{"path": path, "name": "c after a", "scale": 0.5}]
    plain = marks(Lora(path))
    assert marks(Lora(path)) == plain
    others = {plain, marks(), marks(Lora(path, 0.5)), marks(Lora(str(build_adapter(tmp_path / "2", {A: B}))))}
    os.utime(path, ns=(1, 1))
    assert len(others | {marks(Lora(path))}) == 5


# --- what is refused ---------------------------------------------------------------------------------


def refused(loaded: Loaded, *paths: str) -> LoadRefused:
    with pytest.raises(LoadRefused) as error:
        loaded.adapters(*(Lora(path) for path in paths))
    assert error.value.permanent
    assert paths[-1] in str(error.value)
    assert str(error.value).startswith("lora: ")
    return error.value


def test_a_file_that_is_not_there(loaded: Loaded, path: str, tmp_path: Path) -> None:
    error = refused(loaded, path, str(tmp_path / "none.gguf"))
    assert error.code == "adapter_not_found"
    assert "check the path" in str(error)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "adapter_empty"),
        (b"not a model", "adapter_not_gguf"),
        (b"version https://git-lfs.github.com/spec/v1\n", "adapter_is_lfs_pointer"),
    ],
)
def test_a_file_that_is_no_gguf(loaded: Loaded, tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refused(loaded, str(path)).code == code


def test_a_file_that_is_cut_off(loaded: Loaded, path: str) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:-100])
    assert refused(loaded, path).code == "adapter_truncated"


def test_a_model_is_no_adapter(loaded: Loaded) -> None:
    error = refused(loaded, loaded.file.path)
    assert error.code == "adapter_not_an_adapter"
    assert "convert_lora_to_gguf.py" in str(error)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"architecture": "gemma3"}, "adapter_mismatch", "for 'gemma3' models, and .* is 'llama': use one"),
        ({"tensor": "blk.7.attn_q.weight"}, "adapter_mismatch", "blk.7.attn_q.weight' does not exist"),
        ({"size": 64}, "adapter_mismatch", "incorrect shape"),
        ({"kind": "control_vector"}, "adapter_unsupported", "of type 'control_vector'"),
        ({"activated": True}, "adapter_unsupported", "activated LoRA"),
        ({"alpha": 1}, "adapter_corrupt", "alpha is no float"),
    ],
)
def test_an_adapter_that_does_not_fit(
    loaded: Loaded, path: str, tmp_path: Path, change: dict[str, Any], code: str, said: str
) -> None:
    wrong = str(build_adapter(tmp_path / "wrong.gguf", {}, **change))
    error = refused(loaded, path, wrong)
    assert error.code == code
    assert re.search(said, str(error)), str(error)
    # Nothing of it stays with the model.
    adapters = loaded.adapters(Lora(path))
    assert loaded.next_after(A, adapters) == C
    adapters.close()


# --- the order in which all is freed -----------------------------------------------------------------


class CountingLibrary:
    """The native library, counting the adapters that are loaded."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama
        self.live = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def llama_adapter_lora_init(self, *arguments: Any) -> Any:
        native = self._llama.llama_adapter_lora_init(*arguments)
        self.live += bool(native)
        return native

    def llama_adapter_lora_free(self, native: Any) -> None:
        self.live -= 1
        self._llama.llama_adapter_lora_free(native)


@pytest.mark.parametrize("wrong", [False, True])
def test_each_adapter_is_freed_once(loaded: Loaded, path: str, tmp_path: Path, wrong: bool) -> None:
    library = CountingLibrary(loaded.llama)
    paths: Sequence[str] = [path, str(build_adapter(tmp_path / "2", {}, size=64 if wrong else None))]
    files = check_adapters([Lora(one) for one in paths], loaded.file)
    if wrong:
        with pytest.raises(LoadRefused):
            Adapters.load(library, loaded.log, loaded.model, files)
    else:
        adapters = Adapters.load(library, loaded.log, loaded.model, files)
        assert library.live == 2
        adapters.close()
        adapters.close()
    assert library.live == 0

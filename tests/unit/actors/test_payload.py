from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xrl_lite.actors.failure import describe, pack_failure, unpack_failure
from xrl_lite.actors.payload import Packed, pack, share, unpack
from xrl_lite.actors.segments import THRESHOLD_BYTES
from xrl_lite.errors import ActorTaskError, PayloadError

torch = pytest.importorskip("torch")


def round_trip(value: Any) -> Any:
    return unpack(pack(value, name="value"))


def test_small_payloads_need_no_segment() -> None:
    assert pack({"a": 1}, name="value").segments == ()


def test_a_payload_has_at_most_one_segment_of_its_own() -> None:
    packed = pack([np.zeros(100_000), np.ones(100_000), b"x" * THRESHOLD_BYTES], name="value")
    assert len(packed.segments) == 1
    assert len(packed.body) < 100


def test_a_packed_value_can_be_read_many_times_and_each_reader_owns_his_copy() -> None:
    packed = pack(np.zeros(1 << 20), name="value", once=False)
    first, second = unpack(packed), unpack(packed)
    first[0] = 1
    assert second[0] == 0
    assert unpack(packed)[0] == 0


def test_memory_outlives_the_descriptor() -> None:
    packed = pack(np.arange(1 << 20), name="value")
    value = unpack(packed)
    packed.segments[0].close()
    np.testing.assert_array_equal(value, np.arange(1 << 20))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.randn(300, 400),
        torch.randn(300, 400).T,
        torch.randn(1000, 300)[::2, 1:],
        torch.randn(70_000).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(3.5),
        torch.ones(100_000, dtype=torch.bool),
        torch.randn(50_000, dtype=torch.complex64).conj(),
        torch.randn(3, requires_grad=True),
        torch.randn(2, 3).to_sparse(),
    ],
)
def test_tensors_of_every_kind_arrive(tensor: Any) -> None:
    result = round_trip({"tensor": tensor})["tensor"]
    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    assert result.requires_grad == tensor.requires_grad
    assert torch.equal(result.to_dense(), tensor.to_dense())


def test_tensors_are_writable_after_they_arrived() -> None:
    for tensor in (torch.zeros(3), torch.zeros(1 << 20)):
        result = round_trip(tensor)
        result += 1
        assert tensor[0] == 0


def lies_in_shared_memory(address: int) -> bool:
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:xrl-lite" in line]
    bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in bounds)


def test_large_tensors_and_arrays_are_received_without_a_copy() -> None:
    sent = {"tensor": torch.zeros(100_000), "array": np.zeros(100_000)}
    received = round_trip(sent)
    assert lies_in_shared_memory(received["tensor"].data_ptr())
    assert lies_in_shared_memory(received["array"].ctypes.data)
    assert not lies_in_shared_memory(sent["tensor"].data_ptr())


def test_parameters_stay_parameters() -> None:
    parameter = torch.nn.Parameter(torch.randn(100_000), requires_grad=False)
    result = round_trip(parameter)
    assert isinstance(result, torch.nn.Parameter)
    assert not result.requires_grad
    module = round_trip(torch.nn.Linear(300, 300))
    assert sum(p.numel() for p in module.parameters()) == 90_300


def test_code_and_tensors_travel_together() -> None:
    tensor = torch.randn(100_000)
    packed = pack(lambda: tensor, name="value")
    assert packed.segments
    assert torch.equal(unpack(packed)(), tensor)


def test_shared_values_keep_one_segment_and_go_nowhere_else() -> None:
    shared = share(torch.arange(100_000))
    packed = pack([shared, {"again": shared}, np.zeros(100_000)], name="value")
    assert len(packed.segments) == 2
    first, second, _ = unpack(packed)
    assert torch.equal(first.get(), torch.arange(100_000))
    assert torch.equal(second["again"].get(), first.get())
    with pytest.raises(pickle.PicklingError, match="SharedValue"):
        pickle.dumps(shared)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: lock, "value"),
        (lambda lock: [1, {"k": (0, lock)}], r"value\[1\]\['k'\]\[1\]"),
        (lambda lock: Holder(Holder(lock)), r"value\.inner\.inner"),
        (lambda lock: lambda: lock, "value.<variable lock>"),
        (lambda lock: Holder(lock).method, r"value\.__self__\.inner"),
    ],
)
def test_a_refusal_names_the_path(make: Any, path: str) -> None:
    with pytest.raises(PayloadError, match=rf"^{path} cannot be sent"):
        pack(make(threading.Lock()), name="value")


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self) -> None: ...


def test_a_failure_survives_whatever_its_exception_is() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __reduce__(self) -> Any:
            raise RuntimeError("no pickle")

    try:
        raise OddError
    except OddError as error:
        failure = unpack_failure(pack_failure(describe(error)))
    carried = failure.error("judger/0", "score")
    assert isinstance(carried, ActorTaskError)
    assert "OddError" in str(carried)
    assert "judger/0" in str(carried)


def test_a_failure_with_a_huge_text_still_fits_a_frame() -> None:
    failure = describe(ValueError("é" * 1_000_000))
    assert len(pack_failure(failure).body) < 200_000


def test_importing_the_package_is_cheap_and_loads_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = (
        "import sys, xrl_lite.actors; "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    from xrl_lite import actors

    assert all(getattr(actors, name) is not None for name in actors.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = actors.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_an_empty_payload_packs() -> None:
    assert unpack(pack(None, name="value")) is None
    assert Packed(b"").size_bytes == 0

"""Tensors as values (rule V1)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh import limits
from trimesh._runtime.values import torch_values
from trimesh._wire.pickled.payload import Decoder, Encoded, Encoder
from trimesh.errors import PayloadError

torch = pytest.importorskip("torch", reason="these are values of torch, which is an extra")
pytestmark = pytest.mark.torch

BIG = limits.BUFFER_INLINE_BYTES

torch_values.register()
torch.zeros(1 << 20).add_(1)  # starts torch's threads, which no test is to answer for


def received(encoded: Encoded) -> list[memoryview]:
    """Return the bodies as a transport hands them over: writable and private."""
    return [memoryview(bytearray(buffer)) for buffer in encoded.buffers]


def round_trip(value: Any) -> Any:
    encoded = Encoder().encode(value, what="the value")
    return Decoder().decode(encoded.payload, received(encoded))


def storage_of(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()  # type: ignore[no-any-return]


DTYPES = [
    name
    for name in (
        "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "uint8", "int8", "int16", "int32",
        "int64", "bool", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
    )
    if hasattr(torch, name)
]  # fmt: skip


def inference() -> Any:
    with torch.inference_mode():
        return torch.arange(4.0)


TENSORS: dict[str, Callable[[], Any]] = {
    "small": lambda: torch.arange(5.0),
    "large": lambda: torch.arange(float(BIG)),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 3),
    "empty_strided": lambda: torch.zeros(3, 4)[:0, ::2],
    "transposed": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "offset": lambda: torch.arange(float(BIG))[100:],
    "strided": lambda: torch.arange(float(BIG))[::2],
    "sparse_view": lambda: torch.arange(16.0 * BIG).reshape(-1, 16)[:, 3],
    "expanded": lambda: torch.arange(3.0).expand(5, 3),
    "diagonal": lambda: torch.arange(10000.0).reshape(100, 100).diagonal(),
    "conjugated": lambda: torch.randn(6, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
    "conjugated_column": lambda: torch.randn(BIG, 16, dtype=torch.complex64).conj()[:, 3],
    "negated_large": lambda: torch.randn(BIG, 16, dtype=torch.complex64).conj().imag,
    "wants_grad": lambda: torch.arange(5.0, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3, 4)),
    "frozen_parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "inference": inference,
}


@rows("name", TENSORS)
def test_tensor_arrives_equal_writable_and_private(name: str) -> None:
    """V1."""
    tensor = TENSORS[name]()
    before = tensor.detach().clone()

    arrived = round_trip(tensor)

    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.shape, arrived.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert (arrived.is_conj(), arrived.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert (arrived.requires_grad, arrived.is_leaf) == (tensor.requires_grad, True)
    assert torch.equal(arrived.detach(), before)
    if not (tensor.is_conj() or tensor.is_neg()):
        assert arrived._base is None, "what writes to it in place would have to know of another tensor"
    arrived.untyped_storage().fill_(0)
    assert torch.equal(tensor.detach(), before)


@rows("name", DTYPES)
@rows("count", [7, BIG])
def test_tensor_of_any_dtype_arrives(name: str, count: int) -> None:
    """V1."""
    dtype = getattr(torch, name)
    tensor = torch.randint(0, 2, (count,)).to(dtype)

    arrived = round_trip(tensor)

    assert arrived.dtype is dtype
    assert bytes(arrived.untyped_storage()) == bytes(tensor.untyped_storage())


@pytest.mark.parametrize("name", ["transposed", "channels_last", "expanded", "strided"])
def test_strides_are_kept(name: str) -> None:
    tensor = TENSORS[name]()

    assert round_trip(tensor).stride() == tensor.stride()


def test_large_tensor_is_lent_not_copied() -> None:
    tensor = torch.zeros(BIG)

    encoded = Encoder().encode(tensor, what="a")
    tensor[0] = 5.0

    assert [buffer.nbytes for buffer in encoded.buffers] == [4 * BIG]
    assert len(encoded.payload) < 300
    assert Decoder().decode(encoded.payload, received(encoded))[0] == 5.0


def test_buffers_keep_a_temporary_tensor_alive() -> None:
    encoded = Encoder().encode(torch.full((1 << 20,), 7, dtype=torch.uint8), what="a")

    [torch.full((1 << 20,), 9, dtype=torch.uint8) for _ in range(8)]  # would fall on freed memory

    assert int(Decoder().decode(encoded.payload, received(encoded)).sum()) == 7 << 20


def test_arrived_tensor_keeps_its_memory_alive() -> None:
    arrived = round_trip(torch.full((1 << 20,), 7, dtype=torch.uint8))

    [bytearray(b"\x09" * (1 << 20)) for _ in range(8)]

    assert int(arrived.sum()) == 7 << 20


@pytest.mark.parametrize("size", [20, BIG])
def test_views_of_one_tensor_share_a_storage(size: int) -> None:
    """V1."""
    base = torch.arange(2.0 * size).reshape(2, size)

    encoded = Encoder().encode((base[0, 3:8], base, base.T, base[:, ::2], base.view(torch.int32)), what="a")
    part, whole, transposed, skipping, bits = Decoder().decode(encoded.payload, received(encoded))
    whole[0, 4] = -1.0

    assert encoded.nbytes < 4 * base.numel() + 1200
    assert part[1] == -1.0
    assert transposed[4, 0] == -1.0
    assert skipping[0, 2] == -1.0
    assert bits[0, 4] == torch.tensor(-1.0).view(torch.int32)
    assert len({storage_of(t) for t in (part, whole, transposed, skipping, bits)}) == 1


def test_numpy_view_of_a_tensor_stays_shared() -> None:
    """V1."""
    pytest.importorskip("numpy", reason="numpy is no dependency")
    tensor = torch.arange(float(BIG))

    arrived, array = round_trip((tensor, tensor.numpy()))
    arrived[3] = -1.0

    assert array[3] == -1.0


def test_same_parameter_twice_arrives_as_one() -> None:
    weight = torch.nn.Parameter(torch.randn(3))

    a, b = round_trip((weight, weight))

    assert a is b


def test_only_the_bytes_of_a_small_view_travel() -> None:
    base = torch.zeros(1000, BIG)

    row = Encoder().encode(base[3], what="a")
    column = Encoder().encode(base[:, 3], what="a")
    both = Encoder().encode((base[3], base[7]), what="a")

    assert row.nbytes < 4 * BIG + 500
    assert column.nbytes < 4 * 1000 + 500
    assert both.nbytes < 2 * 4 * BIG + 1000
    assert len(both.buffers) == 2


def test_arrived_view_holds_only_its_bytes() -> None:
    base = torch.zeros(1000, 10)

    assert round_trip(base[3]).untyped_storage().nbytes() == 40


def test_module_and_its_state_arrive() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    torch.manual_seed(1)
    data = torch.randn(8, 64)
    model.eval()

    arrived, state, other = round_trip((model, model.state_dict(), optimizer.state_dict()))

    assert arrived[0].weight is arrived[2].weight
    assert torch.equal(arrived(data), model(data))
    assert storage_of(state["0.weight"]) == storage_of(arrived[0].weight)
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(other["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    arrived.train()(data).sum().backward()


def test_no_leaf_arrives_detached() -> None:
    """As a leaf that wants grad it would collect gradients that never reach what it was computed from."""
    leaf = torch.arange(3.0, requires_grad=True)

    arrived = round_trip([leaf * 2, leaf])

    assert [(one.requires_grad, one.is_leaf) for one in arrived] == [(False, True), (True, True)]
    assert arrived[0].tolist() == [0, 2, 4]


def test_attributes_of_a_tensor_arrive() -> None:
    tensor = torch.nn.Buffer(torch.arange(3.0), persistent=False)
    tensor.tag = "x"

    arrived = round_trip(tensor)

    assert (arrived.tag, arrived.persistent) == ("x", False)
    assert isinstance(arrived, torch.nn.Buffer)


def test_meta_tensor_arrives_without_bytes() -> None:
    tensor = torch.empty(1 << 40, 2, device="meta", dtype=torch.bfloat16).T

    encoded = Encoder().encode(tensor, what="a")
    arrived = Decoder().decode(encoded.payload)

    assert encoded.nbytes < 500
    assert (arrived.device.type, arrived.shape, arrived.stride()) == ("meta", tensor.shape, tensor.stride())


FALLBACKS: dict[str, Callable[[], Any]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8),
    "subclass": lambda: torch.arange(4.0).as_subclass(OwnTensor),
}


class OwnTensor(torch.Tensor):  # type: ignore[misc,name-defined]
    pass


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
def test_other_tensors_go_torchs_own_way(name: str) -> None:
    tensor = FALLBACKS[name]()

    arrived = round_trip(tensor)

    assert type(arrived) is type(tensor)
    assert arrived.layout == tensor.layout
    assert repr(arrived) == repr(tensor)


def test_tensor_with_hooks_goes_torchs_own_way() -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    tensor.register_hook(print)

    with pytest.warns(UserWarning, match="backward hook"):
        arrived = round_trip(tensor)

    assert torch.equal(arrived, tensor)


def test_tensor_on_a_device_that_is_not_here_is_a_payload_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(bytearray(12))
    args = (data, torch.float32, (3,), (1,), 12, (False,) * 4, "cuda:7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(ValueError, match=r"on cuda:7 arrived in a process that sees 2 CUDA devices"):
        torch_values.rebuild_tensor(*args)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensor_arrives_on_its_device() -> None:
    base = torch.arange(4.0 * BIG, device="cuda")

    whole, part, column = round_trip((base, base[5:], base.view(4, -1)[:, 1]))
    whole[7] = -1.0

    assert (whole.device, whole.shape) == (base.device, base.shape)
    assert part[2] == -1.0
    assert column[2] == base.view(4, -1)[2, 1]
    assert storage_of(whole) == storage_of(part)
    assert torch.equal(round_trip(base.view(4, -1)[:, 1]), base.view(4, -1)[:, 1])


def test_device_memory_is_read_range_by_range() -> None:
    """The path of a device's memory, with the one device that is always there."""
    tensor = torch.arange(100, dtype=torch.uint8)
    storage = tensor.untyped_storage()

    view = torch_values._device_memory(storage, storage.data_ptr() + 10, 5)

    assert bytes(view) == bytes(range(10, 15))


def test_active_modes_see_nothing() -> None:
    """N1: an active mesh must not run the arrival of a value on every rank."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Function(TorchFunctionMode):  # type: ignore[misc,no-any-unimported]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):  # type: ignore[misc,no-any-unimported]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    value = [torch.randn(BIG, 16, dtype=torch.complex64).conj()[:, 3], torch.zeros(0), torch.arange(3.0)]
    encoded = Encoder().encode(value, what="a")
    with Function(), Dispatch():
        torch.zeros(1)
        calls = len(seen)
        arrived = Decoder().decode(encoded.payload, received(encoded))
        again = Encoder().encode(value, what="a")
    dispatched = [call for call in seen[calls:] if "aten" in str(call)]

    assert calls
    assert dispatched == []
    assert torch.equal(arrived[0], value[0])
    assert again.payload == encoded.payload


def test_default_device_does_not_matter() -> None:
    encoded = Encoder().encode(torch.arange(3.0), what="a")

    with torch.device("meta"):
        assert Decoder().decode(encoded.payload).device.type == "cpu"


def test_misaligned_memory_is_copied() -> None:
    memory = memoryview(bytearray(1 + 4 * 8))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = next(n for n in range(1, 9) if (whole.data_ptr() + n) % 8)

    tensor = torch_values.rebuild_tensor(memory[offset : offset + 24], torch.float64, (3,), (1,), 24)

    assert tensor.data_ptr() % 8 == 0
    assert tensor.tolist() == [0.0] * 3


def test_read_only_memory_is_copied() -> None:
    """V1: a write to read-only memory would end the process."""
    tensor = torch_values.rebuild_tensor(memoryview(bytes(24)), torch.float64, (3,), (1,), 24)

    tensor += 1

    assert tensor.tolist() == [1.0] * 3


def test_broken_tensor_is_a_payload_error() -> None:
    encoded = Encoder().encode(torch.zeros(BIG), what="a")

    with pytest.raises(PayloadError):
        Decoder().decode(encoded.payload, [memoryview(bytearray(8))])


@pytest.mark.real
def test_torch_is_served_when_it_is_imported_later() -> None:
    code = """
        import sys
        from trimesh._runtime.values import torch_values
        from trimesh._wire.pickled.payload import Decoder, Encoder
        torch_values.register()
        encoder = Encoder()
        encoder.encode([1, object], what="a")
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        import torch
        encoded = encoder.encode(torch.zeros(100_000), what="a")
        assert len(encoded.buffers) == 1
    """

    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, timeout=HANG_SECONDS)

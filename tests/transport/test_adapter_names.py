"""What RDMA adapters are called."""

from __future__ import annotations

from tests.rows import rows

from trimesh._transport.native.mover import adapter_name


@rows(
    ("transports", "name"),
    [
        ("rc_verbs/rxe0:1, ud_verbs/rxe0:1", "ibverbs"),
        ("dc_mlx5/mlx5_0:1", "ibverbs"),
        ("cuda_copy/cuda, rc_mlx5/mlx5_bond_0:1", "ibverbs"),
        ("ud_verbs/rdmap16s27:1", "efa"),
        ("ud_verbs/efa_0:1", "efa"),
        ("srd/rdmap0s31:1", "efa"),
        ("tcp/eth0, self/memory", "ucx"),
        ("ugni_rdma/GPU", "ucx"),
        ("", "ucx"),
    ],
)
def test_name_says_what_drives_the_adapters(transports: str, name: str):
    assert adapter_name(f"UCX 1.19.0 (/opt/rc_verbs/efa_0 (1): 2/lib/libucp.so.0): {transports}") == name


def test_missing_adapters_have_no_name_of_their_own():
    assert adapter_name("this machine has no RDMA adapter") == "ucx"

"""Where kernels that several GPUs run together serve, in a process of its own, which has eight devices of a CPU."""

from tests import fake_devices


def test_programs_for_gpus() -> None:
    assert fake_devices.run("tests.parallel.on_peers") == ["sums", "entries", "moves", "reach", "contracts"]

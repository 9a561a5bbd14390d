"""What runs CUDA kernels on a CPU finds the mistakes that it is there to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_on_cpu import COMPILER, in_reverse, loaded, without_assembly

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler, or this is not Linux")

HEAD = """
extern "C" __global__ void __launch_bounds__(64)
    turned(const float *given, float *result, int size) {
  extern __shared__ __align__(16) float row[];
  const unsigned place = (unsigned)__cvta_generic_to_shared(row + 4 * threadIdx.x);
"""
TAIL = """
  for (int i = 0; i < 4; i++) result[4 * threadIdx.x + i] = row[4 * (blockDim.x - 1 - threadIdx.x) + i];
}
"""
ASK = """asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(given + 4 * threadIdx.x));"""
TAKE = """asm volatile("cp.async.wait_all;" ::: "memory");"""


def turned(code, size=64):
    """Each thread copies four numbers to shared memory and reads those of another one."""
    given = torch.arange(4.0 * size)
    result = torch.empty_like(given)
    loaded(HEAD + code + TAIL, "turned")((1,), size, given, result, size, shared=16 * size)
    return result


EXPECTED = torch.arange(256.0).view(64, 4).flip(0).flatten()


def test_threads_wait_at_a_barrier():
    code = f"{ASK} {TAKE} __syncthreads();"
    assert torch.equal(turned(code), EXPECTED)
    with in_reverse():
        assert torch.equal(turned(code), EXPECTED)


@pytest.mark.parametrize("barrier", ["", "__syncwarp();"])
def test_a_missing_barrier_is_seen(barrier):
    assert not torch.equal(turned(f"{ASK} {TAKE} {barrier}"), EXPECTED)


@pytest.mark.parametrize(("groups_left", "is_there"), [(0, True), (1, False)])
def test_a_copy_is_there_when_it_was_waited_for(groups_left, is_there):
    group = f"""asm volatile("cp.async.commit_group;"); asm volatile("cp.async.wait_group %0;" ::"n"({groups_left}));"""
    assert turned(f"{ASK} __syncthreads();").isnan().all()
    assert torch.equal(turned(f"{ASK} {group} __syncthreads();"), EXPECTED) == is_there


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("if (threadIdx.x % 2) __syncwarp();", "__syncwarp"),
        ("if (threadIdx.x == 3) return; __shfl_xor_sync(~0u, size, 1);", "__shfl_xor_sync"),
        (ASK.replace('"r"(place)', '"r"(place + 4)'), "multiple of 16"),
        (ASK.replace('"r"(place)', '"r"(place + 1024)'), "beyond"),
    ],
)
def test_what_a_gpu_does_not_allow_is_an_error(code, message):
    with pytest.raises(AssertionError, match=message):
        turned(code)


def test_arguments_of_another_size_are_an_error():
    with pytest.raises(AssertionError, match="size"):
        loaded(HEAD + TAIL, "turned")((1,), 64, 1, 1, 1)


def test_operands_in_another_order_are_an_error():
    with pytest.raises(AssertionError, match="order"):
        without_assembly('asm("add.f32 %0, %2, %1;" : "=f"(sum) : "f"(a), "f"(b));')


def test_assembly_becomes_a_call():
    assert without_assembly('asm("add.f32 %0, %1;" : "=f"(sum[i(1)]) : "f"(b));') == "ptx_add_f32(sum[i(1)], b);"


def watched(*arguments):
    """Run Python with AddressSanitizer, which must be loaded before everything else: code and output."""
    library = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    here = Path(__file__).parent
    environment = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=here, env=os.environ | environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("number", "is_seen"), [(255, False), (256, True)])
def test_a_write_beyond_global_memory_is_seen(number, is_seen):
    code = f"result[{number}] = 0; result[0] = given[{number}];"
    failed, output = watched("-c", f"from test_cuda_on_cpu import turned; turned('{code}')")
    assert bool(failed) == is_seen
    assert ("heap-buffer-overflow" in output) == is_seen


@pytest.mark.soak
@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ("kernels/test_resnet.py", "emulated"),
        ("kernels", "emulated and not resnet"),
        ("augmentation", "emulated"),
        ("reporting/test_kernel_check.py", "emulated and torchs"),
    ],
)
def test_kernels_stay_within_global_memory(files, chosen):
    failed, output = watched("-m", "pytest", files, "-k", chosen)
    assert not failed, output[-5000:]

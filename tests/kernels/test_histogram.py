# The CUDA kernels: what they compute, as C++ on this processor; that they compile; on a GPU, all of it.

import ctypes
import math
import shutil
import subprocess

import pytest
import torch

from compress.kernels.histogram import KINDS, SOURCE, compile_cuda, compiler
from compress.quantization.calibration import histogram
from compress.quantization.calibration.histogram import row_amax

CPU = torch.device("cpu")
BINS, START = 300, 64

# CUDA in words of C++: a block has one thread, each block is a thread of the processor's
PRELUDE = r"""
#include <cmath>
#include <cstring>
#include <sched.h>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
#define __shared__ static thread_local
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static const Index threadIdx{0}, gridDim{3};
static thread_local Index blockIdx{0};
static thread_local unsigned* table;
template <class To, class From> To bits(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
float __uint_as_float(unsigned u) { return bits<float>(u); }
unsigned __float_as_uint(float f) { return bits<unsigned>(f); }
float __fdiv_rn(float a, float b) { return a / b; }
float __frcp_rn(float a) { return 1.0f / a; }
float __fmul_rn(float a, float b) { return a * b; }
float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
unsigned __float2uint_rz(float q) { return !(q > 0) ? 0 : q < 4294967296.0f ? (unsigned)q : 0xffffffffu; }
unsigned __reduce_max_sync(unsigned, unsigned x) { return x; }
unsigned __reduce_add_sync(unsigned, unsigned x) { return x; }
void __syncthreads() {}
void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __nanosleep(unsigned) { sched_yield(); }
template <class T> T atomicAdd(T* p, T x) { return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); }
template <class T> void atomicMax(T* p, T x) {
    T seen = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (seen < x && !__atomic_compare_exchange_n(p, &seen, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
}
static unsigned place_of(unsigned* bins) { table = bins; return 0; }
static void bump(unsigned, unsigned bin) { table[bin]++; }
static float larger(float a, float b) { return a > b || a != a ? a : b; }
static void unpack_halves(unsigned word, float* x) {
    x[0] = bits<_Float16>((unsigned short)word);
    x[1] = bits<_Float16>((unsigned short)(word >> 16));
}
"""

LAUNCH = r"""
template <class Kernel, class... Arguments> void on_all_blocks(Kernel kernel, Arguments... arguments) {
    std::vector<std::thread> blocks;
    for (unsigned i = 0; i < gridDim.x; i++)
        blocks.emplace_back([=] { blockIdx.x = i; kernel(arguments...); });
    for (auto& block : blocks) block.join();
}
extern "C" void run_largest(scalar* x, u64 n, u32* amax) { on_all_blocks(largest, x, n, amax); }
extern "C" void run_watch(scalar* x, u64 n, u32* amax, float* width, u64* counts, u32* gate) {
    on_all_blocks(watch, x, n, amax, width, counts, gate);
}
"""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def on_processor(request, tmp_path_factory):
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(f"#define HOST\n{PRELUDE}{SOURCE.read_text()}{LAUNCH}")
    macros = {"KIND": KINDS[request.param], "BINS": BINS, "START": START, "THREADS": 1, "BLOCKS": 1, "UNROLL": 2}
    command = [found, "-std=c++17", "-w", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
    command += [*(f"-D{k}={v}" for k, v in macros.items()), "kernels.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=100)
    return request.param, ctypes.CDLL(str(folder / "kernels.so"))


def call(function, values, *tables):
    pointers = [ctypes.c_void_p(table.data_ptr()) for table in tables]
    function(ctypes.c_void_p(values.data_ptr()), ctypes.c_uint64(values.numel()), *pointers)


def sequences():
    growing = [torch.zeros(9), torch.randn(3000).relu(), 2 * torch.randn(701)[1:], 40 * torch.randn(903)[3:]]
    yield [*growing, torch.randn(50), torch.zeros(3)]
    yield [torch.tensor([64.0, 63.0, 1.0]), torch.tensor([64.0, 128.0]), torch.tensor([-300.0]), torch.tensor([301.0])]
    for width in (0.3, 0.7072, 1.9999999, 3.0):
        edges = torch.arange(START + 1) * width
        up = torch.nextafter(edges, torch.tensor(math.inf))[:-1]
        yield [edges, torch.cat([up, -torch.nextafter(edges[1:], torch.tensor(0.0))])]
    for scale in (1e-30, 1e30):  # where only the division itself is exact
        yield [scale * torch.randn(800), 3 * scale * torch.randn(800)]


def assert_same(one, other):
    for name in ("counts", "width", "amax"):
        assert torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu()), name


def test_the_kernel_counts_what_the_processor_does(on_processor, monkeypatch):
    dtype, library = on_processor
    monkeypatch.setattr(histogram, "BINS", START)
    for batches in sequences():
        expected, counted = (histogram.Histogram.empty(1, BINS, CPU) for _ in range(2))
        gate = torch.zeros(2, dtype=torch.int32)
        for batch in batches:
            batch = batch.to(dtype)
            if not batch.isfinite().all():
                break
            expected.add(batch[None])
            call(library.run_watch, batch, counted.amax, counted.width, counted.counts, gate)
            assert_same(counted, expected)


@pytest.mark.parametrize("values", [[1.0] * 40 + [-5.0], [math.nan, 3.0], [3.0, math.nan], [-math.inf, 1.0], [0.0]])
def test_the_largest_magnitude(on_processor, values):
    dtype, library = on_processor
    x, amax = torch.tensor(values).to(dtype), torch.tensor([0.5])
    call(library.run_largest, x, amax)
    expected = torch.maximum(row_amax(x[None]), torch.tensor([0.5]))
    torch.testing.assert_close(amax, expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def nvrtc():
    try:
        compiler()
    except OSError:
        pytest.skip("torch without CUDA's compiler")


@pytest.mark.parametrize(("dtype", "capability"), zip(KINDS, [(8, 0), (9, 0), (12, 0)], strict=True))
def test_cudas_compiler_takes_the_kernels(nvrtc, dtype, capability):
    macros = {"KIND": KINDS[dtype], "BINS": 8192, "START": 2048, "THREADS": 1024, "BLOCKS": 1, "UNROLL": 1}
    code = compile_cuda(SOURCE.read_text(), capability, **macros)
    assert code.startswith(b"\x7fELF") and b"watch" in code and b"largest" in code


def test_what_does_not_compile_says_where(nvrtc):
    with pytest.raises(RuntimeError, match=r"kernels\.cu\(1\): error: .*nothing"):
        compile_cuda("int k = nothing;", (9, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_gpu_counts_what_the_processor_does(dtype, monkeypatch):
    monkeypatch.setattr(histogram, "_SAMPLED", 1 << 40)  # the processor counts all values, as the GPU does
    growing = [torch.zeros(99), torch.randn(3_000_001).relu(), 2 * torch.randn(700_003), 40 * torch.randn(900_000)]
    gpu, cpu = (histogram.Histogram.empty(1, histogram.MAX_BINS, torch.device(d)) for d in ("cuda", "cpu"))
    amax = torch.zeros(1, device="cuda")
    for skipped, batch in enumerate([*growing, torch.randn(77)]):
        batch = batch.to(dtype)
        cpu.add(batch[None, skipped:])
        gpu.add(batch.cuda()[None, skipped:])
        histogram.raise_amax(batch.cuda()[None, skipped:], amax)
        assert_same(gpu, cpu)
        assert torch.equal(amax.cpu(), cpu.amax)
    assert gpu._watch is not None

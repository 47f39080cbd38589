// A batch into a histogram in one launch, and the largest magnitude alone: see histogram_cuda.py.
//
// Macros: KIND (of the values: 0 float32, 1 float16, 2 bfloat16), BINS, START (bins that the first batch is spread
// over), THREADS of a block, BLOCKS of a multiprocessor, UNROLL (16-byte loads of a thread at a time).

typedef unsigned int u32;
typedef unsigned long long u64;

#if KIND == 0
typedef float scalar;
#define PER 4
#else
typedef unsigned short scalar;
#define PER 8
#endif
#define TILE (THREADS * UNROLL)

#ifndef HOST  // a test compiles what follows for a processor, with these in other words

// Where `bins` lie in shared memory. Asked once: the compiler would ask for each value.
__device__ __forceinline__ u32 place_of(u32* bins) {
    u32 place;
    asm volatile("{.reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p;}" : "=r"(place) : "l"(bins));
    return place;
}

// Count one. Lanes that meet in a bin are added up by the hardware (ATOMS.POPC.INC).
__device__ __forceinline__ void bump(u32 place, u32 bin) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(place + bin * 4));
}

// NaN where one is.
__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ void unpack_halves(u32 word, float* x) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(x[0]), "=f"(x[1])
        : "r"(word));
}

#endif

__device__ __forceinline__ void unpack(u32 word, float* x) {
#if KIND == 0
    x[0] = __uint_as_float(word);
#elif KIND == 1
    unpack_halves(word, x);
#else
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
#endif
}

__device__ __forceinline__ float one(const scalar* x) {
#if KIND == 0
    return *x;
#else
    float pair[2];
    unpack(*x, pair);
    return pair[0];
#endif
}

// The bin of x >= 0: the quotient rounded to nearest, rounded down. What has no bin comes into bin BINS.
template <bool DIVIDE>
__device__ __forceinline__ u32 bin_of(float x, float width, float inverse) {
    float q;
    if (DIVIDE) {
        q = __fdiv_rn(x, width);
    } else {  // two steps of Newton are as exact where nothing underflows (Markstein, IBM J. Res. Dev. 34, 1990)
        q = __fmul_rn(x, inverse);
        q = __fmaf_rn(__fmaf_rn(-q, width, x), inverse, q);
        q = __fmaf_rn(__fmaf_rn(-q, width, x), inverse, q);
    }
    const u32 bin = __float2uint_rz(q);
    return bin < BINS ? bin : BINS;
}

template <bool COUNT, bool MAX, bool DIVIDE>
__device__ __forceinline__ void take(float x, float width, float inverse, u32 place, float& top) {
    x = fabsf(x);
    if (MAX) top = larger(top, x);
    if (COUNT) bump(place, bin_of<DIVIDE>(x, width, inverse));
}

// Read all n values, and return the largest magnitude. The last come first: they were written last, and are still in
// the cache; what reads the tensor next begins where this ends. What lies beyond the end reads as zero: bin 0 is not
// counted value by value but found in the end, so it may get too many.
template <bool COUNT, bool MAX, bool DIVIDE>
__device__ __forceinline__ float read(const scalar* x, u64 n, float width, float inverse, u32 place) {
    float top = 0.0f;
    u64 head = ((16 - ((u64)x & 15)) & 15) / sizeof(scalar);
    head = head < n ? head : n;
    const u32 vectors = (n - head) / PER;
    const u64 end = head + (u64)vectors * PER;
    if (blockIdx.x == 0) {  // what no aligned load reaches
#pragma unroll 1
        for (u64 i = threadIdx.x; i < head + n - end; i += THREADS)
            take<COUNT, MAX, DIVIDE>(one(x + (i < head ? i : i - head + end)), width, inverse, place, top);
    }
    const uint4* body = (const uint4*)(x + head);
    const u32 tiles = (vectors + TILE - 1) / TILE;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u32 at = (tiles - 1 - tile) * TILE + threadIdx.x;
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++, at += THREADS) v[u] = at < vectors ? body[at] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float value[PER];
            unpack(v[u].x, value);
            unpack(v[u].y, value + PER / 4);
            unpack(v[u].z, value + PER / 2);
            unpack(v[u].w, value + 3 * (PER / 4));
#pragma unroll
            for (int i = 0; i < PER; i++) take<COUNT, MAX, DIVIDE>(value[i], width, inverse, place, top);
        }
    }
    return top;
}

template <bool MAX>
__device__ __forceinline__ float count(const scalar* x, u64 n, float width, u32* bins) {
    const u32 place = place_of(bins), bits = __float_as_uint(width), exponent = bits >> 23;
    if (exponent > 67 && exponent < 187 && (bits & 0x7fffff) != 0x7fffff)  // 2**-59 to 2**59
        return read<true, MAX, false>(x, n, width, __frcp_rn(width), place);
    return read<true, MAX, true>(x, n, width, 0.0f, place);
}

// `top` is in shared memory and 0. Magnitudes have the order of their bits, NaN above infinity.
__device__ __forceinline__ void raise(u32* amax, float mine, u32* top) {
    const u32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(mine));
    if (threadIdx.x % 32 == 0 && bits) atomicMax(top, bits);
    __syncthreads();
    if (threadIdx.x == 0 && *top > *(volatile u32*)amax) atomicMax(amax, *top);
}

// All blocks wait here for each other: gate[0] counts who came, gate[1] how often all had.
__device__ __forceinline__ void meet(u32* gate) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 before = *(volatile u32*)(gate + 1);
        __threadfence();
        if (atomicAdd(gate, 1u) == gridDim.x - 1) {
            *(volatile u32*)gate = 0;
            __threadfence();
            atomicAdd(gate + 1, 1u);
        } else {
            while (*(volatile u32*)(gate + 1) == before) __nanosleep(20);
        }
        __threadfence();
    }
    __syncthreads();
}

__device__ __forceinline__ void clear(u32* bins) {
    for (u32 k = threadIdx.x; k <= BINS; k += THREADS) bins[k] = 0;
    __syncthreads();
}

// One block merges each 2**doublings neighbours, from below: what is written is not read again.
__device__ __forceinline__ void merge(u64* counts, u32 doublings) {
    const u32 shift = doublings < 16 ? doublings : 16;
    for (u32 first = 0; first < BINS; first += THREADS) {
        const u64 at = first + threadIdx.x;
        u64 sum = 0;
        for (u64 k = at << shift; k < ((at + 1) << shift) && k < BINS; k++) sum += ((volatile u64*)counts)[k];
        __syncthreads();
        if (at < BINS) counts[at] = sum;
        __syncthreads();
    }
}

// Add what this block counted. The last live bin is closed above: it has what lies at its upper end, too.
__device__ __forceinline__ void hand_in(const u32* bins, u64* counts, u32 live, u64 n, u32* others) {
    const u32 shift = (blockIdx.x * 64) % live;  // so that blocks do not queue for one bin
    u32 sum = 0;
    for (u32 i = threadIdx.x; i < live; i += THREADS) {
        const u32 bin = 1 + (i + shift < live ? i + shift : i + shift - live);
        if (bins[bin]) atomicAdd(counts + (bin < live ? bin : live - 1), (u64)bins[bin]);
        sum += bins[bin];
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(others, sum);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(counts, (blockIdx.x == 0 ? n : 0) - (u64)*others);  // bin 0 has all the rest
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
largest(const scalar* x, u64 n, u32* amax) {
    __shared__ u32 top;
    if (threadIdx.x == 0) top = 0;
    __syncthreads();
    raise(amax, read<false, true, false>(x, n, 0.0f, 0.0f, 0), &top);
}

// All blocks run at the same time. `gate` is two zeros before the first launch.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
watch(const scalar* x, u64 n, u32* amax, float* width, u64* counts, u32* gate) {
    __shared__ u32 bins[BINS + 1], top, others;
    if (threadIdx.x == 0) top = others = 0;
    clear(bins);
    const float old = *width;
    const bool known = old > 0.0f;
    raise(amax, known ? count<true>(x, n, old, bins) : read<false, true, false>(x, n, 0.0f, 0.0f, 0), &top);
    meet(gate);

    const float reach = __uint_as_float(*(volatile u32*)amax);
    const float first = known ? old : __fdiv_rn(reach, (float)START);
    const u32 crowding = __float_as_uint(__fdiv_rn(__fdiv_rn(reach, first), (float)BINS));
    u32 doublings = 0;
    if (crowding > 0x3f800000u && crowding <= 0x7f800000u)  // more than 1, and not NaN: the logarithm, rounded up
        doublings = (crowding >> 23) - 127 + ((crowding & 0x7fffffu) != 0);
    doublings = doublings < 126 ? doublings : 126;
    const float settled = first * __uint_as_float((doublings + 127) << 23);
    const float wide = settled > 0.0f ? settled : 1.0f;
    const bool fits = known && doublings == 0;
    if (blockIdx.x == 0 && threadIdx.x == 0 && !fits) *width = settled;
    if (reach > 0.0f && !fits) {
        clear(bins);
        count<false>(x, n, wide, bins);
        __syncthreads();
    }
    if (doublings) {
        if (blockIdx.x == 0) merge(counts, doublings);
        meet(gate);
    }
    const float places = ceilf(__fdiv_rn(reach, wide));
    hand_in(bins, counts, places > 1.0f ? (places < (float)BINS ? (u32)places : BINS) : 1, n, &others);
}

/* The statistics of a tensor's values on a CUDA device, in a single read of its memory.
 *
 * Compiled at run time, once per dtype, with -DDTYPE=FLOAT32, FLOAT16 or BFLOAT16. All blocks have 512
 * threads in one dimension; shared memory is static. Pointers marked "zeroed" point to memory whose
 * bytes were set to 0 before the first launch that writes there. No block waits for another.
 *
 *   measure_2, measure_4 (const void *values, u32 elements, Row *row, double *partials)
 *   measure_wide_2, _4, measure_last_2, _4, measure_middle_2, _4
 *                        (the same, and u32 *extremes, u32 units, u32 inner)
 *       One tensor; 2 or 4 says how many powers are summed. Those with units take it as
 *       [outer, units, inner]; "wide" and "last" where inner is 1.
 *       values    Aligned to the size of an element, for "wide" to 16 bytes; contiguous.
 *       elements  1 to 2^31 - 16.
 *       row       Zeroed, aligned to 16 bytes, for this launch alone.
 *       partials  double [gridDim.x][4], for this launch alone.
 *       extremes  Zeroed u32 [units][2]. Units: at least 1, a divisor of elements, for "wide" a
 *                 multiple of the elements in 16 bytes.
 *       Grid: at most 65,535 blocks; two per multiprocessor are best for large tensors, and one per
 *       16,384 elements or so for small ones. "wide" and "last" need gridDim.x * 512 >= units.
 *   measure_many_2, _4   (const Chunk *chunks, Row *rows, double *partials)
 *       Many tensors of one dtype; Chunk.row counts from rows, which are zeroed.
 *       partials  double [gridDim.x][4].
 *   norms                (const Chunk *chunks, Norm *norms, double *partials)
 *       Sums of squares and largest magnitudes; Chunk.row counts from norms, which is zeroed.
 *       partials  double [gridDim.x].
 *   Both: one block per chunk. A tensor's chunks stand one after the other; Chunk.part counts them
 *   from 0 and Chunk.parts is their number.
 *
 * The order of all sums depends only on the launch's arguments and grid, so measuring twice gives the
 * same bits; everything else is integers. The last block of a row or norm to finish adds the partial
 * results of all blocks.
 *
 * Up to 64 registers let two blocks, 1,024 threads, be on a multiprocessor at the same time: all that
 * one of sm_75 holds, and 32 kB of loads in flight, twice what the memory's latency asks for.
 * `python benchmarks/instructions.py` counts the instructions per element, which bound the speed.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE static __device__ __forceinline__
#ifndef THREADS
#define THREADS 512
#endif
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 2)

enum {
    WARPS = THREADS / 32,
    CODES = 4096,         /* the upper 12 bits of a float32 number: see bucket_indices in buckets.py */
    ZEROS = CODES,        /* where each lane counts zeros, in a word of its own */
    COUNTS = CODES + 32,  /* words of a block's histogram */
    NEGATIVE = 2048,      /* where the codes of negative numbers begin */
    NAN_CODE = 2041,      /* these two are no number's upper bits here */
    INF_CODE = 2042,      /* and NEGATIVE + INF_CODE */
    LOCAL_UNITS = 1024    /* up to as many, extremes of units are first reduced within the block */
};

/* One tensor's results; _native.c reads them on the host. */
struct Row {
    u64 elements, zeros;
    u64 low, high;      /* of finite values: the larger, the farther out; 0 before the first */
    double sums[4];     /* of powers; NaN of those that are not summed */
    u32 units, done, padding[2];
    u32 counts[CODES];  /* without zeros; less than 2^31 elements: none wraps */
};
struct Chunk { const char *values; u32 elements, row, part, parts; };
struct Norm { double square; u64 largest; u32 done, padding; }; /* largest: bits of a float64 */

/* --- numbers ---------------------------------------------------------------------------------- */

#define FLOAT32 1
#define FLOAT16 2
#define BFLOAT16 3
#define INFINITE 0x7f800000u

enum {
    SIZE = DTYPE == FLOAT32 ? 4 : 2,
    VECTOR = 16 / SIZE /* elements of 16 bytes */
};

/* Compare the two numbers of a register at once, if the hardware can. */
#define PACKED (DTYPE != FLOAT32 && __CUDA_ARCH__ >= 800)

#if PACKED
enum { EXTREMES = 4 };
typedef u32 Extreme; /* in either half the extreme of every second element */
#define HIGHEST (DTYPE == FLOAT16 ? 0x7c007c00u : 0x7f807f80u)
#define LOWEST (HIGHEST | 0x80008000u)
#else
enum { EXTREMES = VECTOR };
typedef float Extreme;
#define HIGHEST __uint_as_float(INFINITE)
#define LOWEST __uint_as_float(INFINITE | 1u << 31)
#endif

/* Minimum and maximum of numbers that are not NaN. */
#if defined(EMULATED) && PACKED
#elif PACKED
#define COMPARE(NAME, INSTRUCTION)                                                                 \
    INLINE u32 NAME(u32 a, u32 b)                                                                  \
    {                                                                                              \
        u32 result;                                                                                \
        asm(INSTRUCTION " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));                           \
        return result;                                                                             \
    }
#if DTYPE == FLOAT16
COMPARE(lesser, "min.f16x2")
COMPARE(greater, "max.f16x2")
#else
COMPARE(lesser, "min.bf16x2")
COMPARE(greater, "max.bf16x2")
#endif
#else
INLINE float lesser(float a, float b) { return fminf(a, b); }
INLINE float greater(float a, float b) { return fmaxf(a, b); }
#endif

#if !defined(EMULATED) && DTYPE == FLOAT16
INLINE float half_value(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}
#endif

/* The number in the lowest bits. */
INLINE float value_of(u32 bits)
{
#if DTYPE == FLOAT32
    return __uint_as_float(bits);
#elif DTYPE == BFLOAT16
    return __uint_as_float(bits << 16);
#else
    return half_value(bits);
#endif
}

INLINE void values_of(uint4 vector, float *values)
{
    u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (DTYPE == BFLOAT16 && i % 2)
            values[i] = __uint_as_float(words[i / 2] & 0xffff0000u);
        else
            values[i] = value_of(words[i * SIZE / 4] >> i * SIZE * 8 % 32);
}

INLINE u32 ordered(float value)
{
    u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

INLINE u64 ordered(double value)
{
    u64 bits = (u64)__double_as_longlong(value);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

/* The lower half of a converted bfloat16 number is zero: no rounding. */
INLINE u32 code_of(float value)
{
    return (__float_as_uint(value) + (DTYPE == BFLOAT16 ? 0 : 0x8000)) >> 20;
}

INLINE u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7fffffff; }

/* --- extremes --------------------------------------------------------------------------------- */

struct Range { Extreme low = HIGHEST, high = LOWEST; };

INLINE void widen(Range &range, Range other)
{
    range.low = lesser(range.low, other.low);
    range.high = greater(range.high, other.high);
}

#if PACKED
INLINE float least(Range range) { return fminf(value_of(range.low), value_of(range.low >> 16)); }
INLINE float most(Range range) { return fmaxf(value_of(range.high), value_of(range.high >> 16)); }
INLINE Extreme extreme_of(u32 bits) { return bits * 0x10001; }
#else
INLINE float least(Range range) { return range.low; }
INLINE float most(Range range) { return range.high; }
INLINE Extreme extreme_of(u32 bits) { return value_of(bits); }
#endif

/* The extremes of a unit are two codes, for the minimum and the maximum; atomicMax merges them. NaN is
 * the largest code. */
INLINE void raise(u32 *code, u32 to)
{
    if (*(volatile u32 *)code < to) /* usually false, which avoids the atomic */
        atomicMax(code, to);
}

INLINE void raise_unit(u32 *codes, float low, float high)
{
    raise(codes, low != low ? ~0u : ~ordered(low));
    raise(codes + 1, high != high ? ~0u : ordered(high));
}

/* --- taking values in ------------------------------------------------------------------------- */

/* Partial results of a thread. */
struct Seen {
    double sums[4] = {0, 0, 0, 0};
    Range range;
};

INLINE void count(u32 *counts, float value)
{
    atomicAdd(&counts[value != 0 ? code_of(value) : ZEROS + threadIdx.x % 32], 1u);
}

template <int POWERS> INLINE void powers_of(const float *values, float scale, float *powers)
{
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float value = values[i] * scale, square = value * value;
        powers[0] = i ? powers[0] + value : value;
        powers[1] = i ? fmaf(value, value, powers[1]) : square;
        if (POWERS == 4) {
            powers[2] = i ? fmaf(square, value, powers[2]) : square * value;
            powers[3] = i ? fmaf(square, square, powers[3]) : square * square;
        }
    }
}

/* Adds powers of a vector's values, in float32 first; the error is 2^-22 of the sum of magnitudes.
 * Does nothing and returns false if a value is not finite. */
template <int POWERS> INLINE bool add_powers(const float *values, double *sums)
{
    float powers[4];
    powers_of<POWERS>(values, 1, powers);
    /* Within these bounds no power overflows, and underflow loses less than 2^-30 of the sum. */
    const u32 small = DTYPE == FLOAT16 ? 0 : (127 - (POWERS == 4 ? 56 : 112)) << 23;
    const u32 huge = DTYPE == FLOAT16 ? INFINITE : (127 + (POWERS == 4 ? 60 : 120)) << 23;
    if (__float_as_uint(powers[1]) - small < huge - small) {
#pragma unroll
        for (int i = 0; i < POWERS; i++)
            sums[i] += powers[i];
        return true;
    }
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        largest = max(largest, magnitude_of(values[i]));
    if (largest >= INFINITE)
        return false;
    if (DTYPE != FLOAT16 && largest) {
        int exponent = (int)max(largest >> 23, 1u) - 128; /* the largest becomes 2 to 4 */
        powers_of<POWERS>(values, __uint_as_float((u32)(127 - exponent) << 23), powers);
#pragma unroll
        for (int i = 0; i < POWERS; i++)
            sums[i] += powers[i] * __longlong_as_double((i64)(1023 + (i + 1) * exponent) << 52);
    }
    return true;
}

/* One value; "codes" are those of its unit, or NULL. */
template <int POWERS> INLINE void take_one(u32 bits, Seen &seen, u32 *counts, u32 *codes)
{
    float value = value_of(bits);
    if (codes)
        raise_unit(codes, value, value);
    if (magnitude_of(value) >= INFINITE) {
        atomicAdd(&counts[value != value ? NAN_CODE : INF_CODE + (value < 0 ? NEGATIVE : 0)], 1u);
        return;
    }
    count(counts, value);
    Range range;
    range.low = range.high = extreme_of(bits);
    widen(seen.range, range);
    double wide = value, square = wide * wide;
    seen.sums[0] += wide;
    seen.sums[1] += square;
    if (POWERS == 4) {
        seen.sums[2] += square * wide;
        seen.sums[3] += square * square;
    }
}

/* The lowest element of a vector, which is then rotated to the next. */
INLINE u32 next_of(uint4 &vector)
{
    u32 x = vector.x, y = vector.y, z = vector.z, w = vector.w;
#if DTYPE == FLOAT32
    vector = make_uint4(y, z, w, x);
    return x;
#else
    vector = make_uint4(__funnelshift_r(x, y, 16), __funnelshift_r(y, z, 16),
                        __funnelshift_r(z, w, 16), __funnelshift_r(w, x, 16));
    return x & 0xffff;
#endif
}

/* A vector. Its elements are of one unit, if of any, whose extremes are those of seen.range; or each of
 * another one, whose extremes "columns" has. Zeros, half of all behind a ReLU, would wait for each other
 * in the histogram. */
template <int POWERS>
INLINE void take(uint4 vector, Seen &seen, u32 *counts, u32 *codes, Range *columns = 0)
{
    float values[VECTOR];
    values_of(vector, values);
    if (!add_powers<POWERS>(values, seen.sums)) {
#pragma unroll 1
        for (u32 i = 0; i < VECTOR; i++)
            take_one<POWERS>(next_of(vector), seen, counts, columns ? codes + 2 * i : codes);
        return;
    }
#if PACKED
    const Extreme members[EXTREMES] = {vector.x, vector.y, vector.z, vector.w};
#else
    const Extreme *members = values;
#endif
    Range range;
    range.low = range.high = members[0];
#pragma unroll
    for (int i = 0; i < EXTREMES; i++) {
        Range &target = columns ? columns[i] : range;
        target.low = lesser(target.low, members[i]);
        target.high = greater(target.high, members[i]);
    }
    if (!columns)
        widen(seen.range, range);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        count(counts, values[i]);
}

/* --- reading ---------------------------------------------------------------------------------- */

INLINE u32 load_one(const char *at)
{
    return SIZE == 4 ? __ldg((const u32 *)at) : __ldg((const u16 *)at);
}

/* Takes every "stride"-th vector; two are loaded at once. (Loads ahead of the loop's next round would be
 * copied between registers, and copying waits for them.) */
template <class Load, class Take>
INLINE void stream(u32 i, u32 end, u32 stride, Load load, Take take_vector)
{
#pragma unroll 1
    for (; i + stride < end; i += 2 * stride) {
        uint4 a = load(i), b = load(i + stride);
        take_vector(a);
        take_vector(b);
    }
    if (i < end)
        take_vector(load(i));
}

/* Processes one thread's share of values at any address. Values before the first and behind the last
 * aligned 16 bytes are processed one by one. */
template <class Take, class TakeOne>
INLINE void sweep(const char *values, u32 elements, u32 me, u32 threads, Take take_vector,
                  TakeOne take_single)
{
    u32 head = min((u32)(-(u64)values & 15) / SIZE, elements);
    u32 vectors = (elements - head) / VECTOR, single = elements - vectors * VECTOR;
#pragma unroll 1
    for (u32 i = me; i < single; i += threads)
        take_single(load_one(values + (u64)(i < head ? i : i + vectors * VECTOR) * SIZE));
    const uint4 *whole = (const uint4 *)(values + head * SIZE);
    stream(me, vectors, threads, [&](u32 i) { return __ldg(whole + i); }, take_vector);
}

/* --- results ---------------------------------------------------------------------------------- */

struct Totals { double sums[4]; u64 low, high; u32 zeros; };

INLINE double sum_of_lanes(double sum)
{
    for (u32 lanes = 16; lanes; lanes /= 2)
        sum += __shfl_down_sync(~0u, sum, lanes);
    return sum;
}

/* Whether this is the last of a tensor's blocks; the others' results are visible to it. */
INLINE bool is_last(u32 *done, u32 parts)
{
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(done, 1u) == parts - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

/* Adds every "stride"-th number of a warp's; lane 0 has the sum. */
INLINE double sum_of_parts(const volatile double *parts, u32 size, u32 stride)
{
    double sum = 0;
    for (u32 i = threadIdx.x % 32; i < size; i += 32)
        sum += parts[(u64)i * stride];
    return sum_of_lanes(sum);
}

/* Adds the results of a block to its row, which several blocks may share. All threads call this. */
template <int POWERS>
INLINE void write_block(const Seen &seen, const u32 *counts, Row *row, double *partials, u32 part,
                        u32 parts, u32 elements, u32 units)
{
    __shared__ Totals warps[WARPS];
    Totals totals;
    totals.low = ~ordered((double)least(seen.range));
    totals.high = ordered((double)most(seen.range));
    for (int i = 0; i < 4; i++)
        totals.sums[i] = sum_of_lanes(seen.sums[i]);
    for (u32 lanes = 16; lanes; lanes /= 2) {
        totals.low = max(totals.low, __shfl_down_sync(~0u, totals.low, lanes));
        totals.high = max(totals.high, __shfl_down_sync(~0u, totals.high, lanes));
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = totals;
    __syncthreads();
    for (u32 i = threadIdx.x; i < CODES; i += THREADS)
        if (counts[i])
            atomicAdd(&row->counts[i], counts[i]);
    if (threadIdx.x < 32 && counts[ZEROS + threadIdx.x])
        atomicAdd(&row->zeros, (u64)counts[ZEROS + threadIdx.x]);
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < WARPS; warp++) {
            for (int i = 0; i < 4; i++)
                totals.sums[i] += warps[warp].sums[i];
            totals.low = max(totals.low, warps[warp].low);
            totals.high = max(totals.high, warps[warp].high);
        }
        for (int i = 0; i < 4; i++)
            partials[4 * (u64)part + i] = totals.sums[i];
        atomicMax(&row->low, totals.low);
        atomicMax(&row->high, totals.high);
        atomicAdd(&row->elements, (u64)elements);
    }
    if (!is_last(&row->done, parts) || threadIdx.x >= 32)
        return;
    for (int i = 0; i < 4; i++) {
        double sum = i < POWERS ? sum_of_parts(partials + i, parts, 4)
                                : __longlong_as_double(0x7ff8000000000000);
        if (threadIdx.x == 0)
            row->sums[i] = sum;
    }
    if (threadIdx.x == 0)
        row->units = units;
}

INLINE void clear(u32 *words, u32 size)
{
    for (u32 i = threadIdx.x; i < size; i += THREADS)
        words[i] = 0;
}

/* --- one tensor ------------------------------------------------------------------------------- */

/* [outer, units], with whole vectors of units: a thread keeps to the units of one vector. */
template <int POWERS>
INLINE void take_vectors(const uint4 *values, u32 vectors, u32 units, Seen &seen, u32 *counts,
                         u32 *codes)
{
    const u32 across = units / VECTOR, stride = gridDim.x * THREADS / across * across;
    const u32 me = blockIdx.x * THREADS + threadIdx.x;
    if (me >= stride || me >= vectors)
        return;
    u32 *my_codes = codes + 2 * VECTOR * (me % across), known[2 * VECTOR];
    Range columns[EXTREMES];
    stream(me, vectors, stride, [&](u32 i) { return __ldg(values + i); },
           [&](uint4 vector) { take<POWERS>(vector, seen, counts, my_codes, columns); });
#pragma unroll
    for (int i = 0; i < 2 * VECTOR; i++) /* all loads at once, to hide their latency */
        known[i] = *(volatile u32 *)(my_codes + i);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        Range range = columns[i * EXTREMES / VECTOR];
        widen(seen.range, range);
#if PACKED
        u32 shift = i % 2 * 16;
        u32 low = ~ordered(value_of(range.low >> shift)), high = ordered(value_of(range.high >> shift));
#else
        u32 low = ~ordered(range.low), high = ordered(range.high);
#endif
        if (known[2 * i] < low)
            atomicMax(my_codes + 2 * i, low);
        if (known[2 * i + 1] < high)
            atomicMax(my_codes + 2 * i + 1, high);
    }
}

/* [outer, units]: a thread keeps to a column and takes every "rows"-th row; a vector is made of several
 * rows, whose threads side by side read whole lines. */
template <int POWERS>
INLINE void take_columns(const char *values, u32 elements, u32 units, Seen &seen, u32 *counts,
                         u32 *codes)
{
    const u32 me = blockIdx.x * THREADS + threadIdx.x, rows = gridDim.x * THREADS / units;
    const u32 column = me % units, row = me / units, outer = elements / units;
    if (row >= rows || row >= outer)
        return;
    const char *mine = values + ((u64)row * units + column) * SIZE;
    const u64 step = (u64)rows * units * SIZE;
    const u32 mine_count = (outer - row + rows - 1) / rows, vectors = mine_count / VECTOR;
    u32 *my_codes = codes + 2 * column;
#pragma unroll 1
    for (u32 i = 0; i < vectors; i++) {
        const char *at = mine + (u64)i * VECTOR * step;
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 part = 0; part < VECTOR; part++, at += step)
            words[part * SIZE / 4] |= load_one(at) << part * SIZE * 8 % 32;
        take<POWERS>(make_uint4(words[0], words[1], words[2], words[3]), seen, counts, my_codes);
    }
#pragma unroll 1
    for (u32 i = vectors * VECTOR; i < mine_count; i++)
        take_one<POWERS>(load_one(mine + i * step), seen, counts, my_codes);
    raise_unit(my_codes, least(seen.range), most(seen.range));
}

/* [outer, units, inner]: some lanes of a warp, as many as it has vectors, share a run of a unit. */
template <int POWERS>
INLINE void take_runs(const char *values, u32 elements, u32 units, u32 inner, Seen &seen, u32 *counts,
                      u32 *codes)
{
    u32 lanes = 1;
    while (lanes < 32 && (lanes < min(inner, 8u) || lanes * VECTOR < inner))
        lanes *= 2;
    const u32 runs = elements / inner, lane = threadIdx.x % lanes;
    const u32 at_once = gridDim.x * THREADS / lanes;
    for (u32 warp_run = (blockIdx.x * THREADS + threadIdx.x / 32 * 32) / lanes; warp_run < runs;
         warp_run += at_once) {
        const u32 run = warp_run + threadIdx.x % 32 / lanes;
        u32 *my_codes = codes + 2 * (run % units);
        Range before = seen.range;
        seen.range = Range();
        if (run < runs)
            sweep(values + (u64)run * inner * SIZE, inner, lane, lanes,
                  [&](uint4 vector) { take<POWERS>(vector, seen, counts, my_codes); },
                  [&](u32 bits) { take_one<POWERS>(bits, seen, counts, my_codes); });
        for (u32 offset = lanes / 2; offset; offset /= 2) {
            Range other;
            other.low = __shfl_xor_sync(~0u, seen.range.low, offset);
            other.high = __shfl_xor_sync(~0u, seen.range.high, offset);
            widen(seen.range, other);
        }
        if (lane == 0 && run < runs)
            raise_unit(my_codes, least(seen.range), most(seen.range));
        widen(seen.range, before);
    }
}

enum Layout { FLAT, WIDE, LAST, MIDDLE };

template <int POWERS, Layout LAYOUT>
INLINE void measure(const char *values, u32 elements, Row *row, double *partials, u32 *extremes,
                    u32 units, u32 inner)
{
    __shared__ u32 counts[COUNTS];
    Seen seen;
    clear(counts, COUNTS);
    if (LAYOUT == FLAT) {
        __syncthreads();
        sweep(values, elements, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS,
              [&](uint4 vector) { take<POWERS>(vector, seen, counts, 0); },
              [&](u32 bits) { take_one<POWERS>(bits, seen, counts, 0); });
    } else {
        __shared__ u32 local[2 * LOCAL_UNITS];
        const bool few = units <= LOCAL_UNITS;
        if (few)
            clear(local, 2 * units);
        __syncthreads();
        u32 *codes = few ? local : extremes;
        if (LAYOUT == WIDE)
            take_vectors<POWERS>((const uint4 *)values, elements / VECTOR, units, seen, counts, codes);
        else if (LAYOUT == LAST)
            take_columns<POWERS>(values, elements, units, seen, counts, codes);
        else
            take_runs<POWERS>(values, elements, units, inner, seen, counts, codes);
        __syncthreads();
        if (few)
            for (u32 i = threadIdx.x; i < 2 * units; i += THREADS)
                raise(&extremes[i], local[i]);
    }
    write_block<POWERS>(seen, counts, row, partials, blockIdx.x, gridDim.x,
                        blockIdx.x ? 0 : elements, units);
}

#define ONE const char *values, u32 elements, Row *row, double *partials
#define OF_UNITS(NAME, LAYOUT, POWERS)                                                             \
    KERNEL measure_##NAME##_##POWERS(ONE, u32 *extremes, u32 units, u32 inner)                     \
    {                                                                                              \
        measure<POWERS, LAYOUT>(values, elements, row, partials, extremes, units, inner);          \
    }
#define VARIANTS(POWERS)                                                                           \
    KERNEL measure_##POWERS(ONE)                                                                   \
    {                                                                                              \
        measure<POWERS, FLAT>(values, elements, row, partials, 0, 0, 0);                           \
    }                                                                                              \
    OF_UNITS(wide, WIDE, POWERS)                                                                   \
    OF_UNITS(last, LAST, POWERS)                                                                   \
    OF_UNITS(middle, MIDDLE, POWERS)                                                               \
    KERNEL measure_many_##POWERS(const Chunk *chunks, Row *rows, double *partials)                 \
    {                                                                                              \
        measure_many<POWERS>(chunks[blockIdx.x], rows, partials);                                  \
    }

/* --- many tensors ----------------------------------------------------------------------------- */

template <int POWERS> INLINE void measure_many(const Chunk chunk, Row *rows, double *partials)
{
    __shared__ u32 counts[COUNTS];
    Seen seen;
    clear(counts, COUNTS);
    __syncthreads();
    sweep(chunk.values, chunk.elements, threadIdx.x, THREADS,
          [&](uint4 vector) { take<POWERS>(vector, seen, counts, 0); },
          [&](u32 bits) { take_one<POWERS>(bits, seen, counts, 0); });
    write_block<POWERS>(seen, counts, rows + chunk.row, partials + 4 * (u64)(blockIdx.x - chunk.part),
                        chunk.part, chunk.parts, chunk.elements, 0);
}

KERNEL norms(const Chunk *chunks, Norm *norms, double *partials)
{
    __shared__ double warps[WARPS];
    const Chunk chunk = chunks[blockIdx.x];
    Norm *norm = norms + chunk.row;
    double sums[4] = {0, 0, 0, 0};
    u32 largest = 0;
    sweep(chunk.values, chunk.elements, threadIdx.x, THREADS, [&](uint4 vector) {
        float values[VECTOR];
        values_of(vector, values);
        add_powers<2>(values, sums);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            largest = max(largest, magnitude_of(values[i]));
    }, [&](u32 bits) {
        double value = value_of(bits);
        sums[1] += value * value;
        largest = max(largest, magnitude_of(value_of(bits)));
    });
    u64 wide = (u64)__double_as_longlong((double)__uint_as_float(largest));
    if (largest >= INFINITE) /* infinity or NaN, which is then the sum of squares, too */
        sums[1] = __longlong_as_double((i64)wide);
    double square = sum_of_lanes(sums[1]);
    for (u32 lanes = 16; lanes; lanes /= 2)
        wide = max(wide, __shfl_down_sync(~0u, wide, lanes));
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = square;
        atomicMax(&norm->largest, wide);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < WARPS; warp++)
            square += warps[warp];
        partials[blockIdx.x] = square;
    }
    if (!is_last(&norm->done, chunk.parts) || threadIdx.x >= 32)
        return;
    square = sum_of_parts(partials + (blockIdx.x - chunk.part), chunk.parts, 1);
    if (threadIdx.x == 0)
        norm->square = square;
}

VARIANTS(2)
VARIANTS(4)

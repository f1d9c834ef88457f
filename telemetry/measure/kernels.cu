/* The statistics of a tensor's values on a CUDA device, in a single read of its memory.
 *
 * Compiled at run time, once per dtype, with -DDTYPE=FLOAT32, FLOAT64, FLOAT16, BFLOAT16,
 * FLOAT8_E4M3FN or FLOAT8_E5M2; without DTYPE it holds the two kernels that pack a step's results.
 * All blocks have 512 threads in one dimension; shared memory is static (none is to be asked for).
 * Pointers marked "zeroed" point to memory whose bytes were set to 0 before the first launch that
 * writes there. Nothing here waits for another block.
 *
 *   measure_2, measure_4 (const void *values, u32 elements, Row *row, double *partials)
 *   measure_last_2, _4   (const void *values, u32 elements, Row *row, double *partials,
 *                         u32 *extremes, u32 units)
 *   measure_middle_2, _4 (the same, and u32 inner)
 *       One tensor; 2 or 4 says how many powers are summed. "last" takes it as [outer, units],
 *       "middle" as [outer, units, inner].
 *       values    Aligned to the size of an element; contiguous.
 *       elements  1 to 2^31 - 1. A larger tensor takes several rows, whose results the host merges;
 *                 with units each part begins at a multiple of units * inner, and all parts may be
 *                 given the same extremes.
 *       row       Zeroed, aligned to 16 bytes, for this launch alone.
 *       partials  double [gridDim.x][4], for this launch alone, read by pack_heads.
 *       extremes  Zeroed u32 [units][2]. Units: at least 1, a divisor of elements.
 *       Grid: at most 65,535 blocks; two per multiprocessor are best for large tensors, and one per
 *       16,384 elements or so for small ones. "last" needs gridDim.x * 512 >= units.
 *   measure_many_2, _4   (const Chunk *chunks, u32 large, u32 count, Row *rows, double *partials)
 *       Many tensors of one dtype. The first "large" of the "count" chunks take a block each, every
 *       other one a warp: chunks of up to some 2,048 elements, which are not worth a histogram in
 *       shared memory. The same about addresses and elements as above.
 *       rows      Zeroed; Chunk.row counts from here.
 *       partials  double [count][4].
 *       Grid: large + ceil((count - large) / 16).
 *   norms                (const Chunk *chunks, Norm *norms, double *partials)
 *       Sums of squares and largest magnitudes; Chunk.row counts from norms, which is zeroed.
 *       partials  double [gridDim.x].
 *       Grid: one block per chunk.
 *   pack_heads           (Row *rows, Head *heads, const u32 *codes, float *extremes, u64 code_count)
 *   pack_pairs           (const Row *rows, Head *heads, Pair *pairs, u32 capacity)
 *       What the host reads, launched in this order after everything that writes the rows.
 *       heads     Head [rows]. Where a row's pairs end beyond the capacity, it and all after it have
 *                 bucket_count 0 and sampled -2; else sampled is -1.
 *       codes     All extremes of units of the step, as written by measure_last and _middle;
 *                 code_count is two per unit. extremes: float [code_count], in the same order.
 *       pairs     Pair [capacity], those of a row ascending, row after row.
 *       Grid: one block per row, of both.
 *
 * A tensor's chunks stand one after the other; Chunk.part counts them from 0 and Chunk.parts says how
 * many they are. All sums are added in an order that depends on the launch's arguments and grid only,
 * so that measuring twice gives the same bits; everything else is integers.
 *
 * Up to 64 registers let two blocks, 1,024 threads, be on a multiprocessor at the same time: all that
 * one of sm_75 holds, and 32 kB of loads under way, twice what the memory's latency asks for. Forcing
 * four blocks to fit would leave 32 registers, and a vector's values alone may take 16.
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
    CODES = 4096,         /* the upper 12 bits of a float32 number: see bucket_indices in sketch.py */
    NEGATIVE = 2048,      /* where the codes of negative numbers begin */
    LAST_BUCKET = 2039,   /* finite numbers that round to infinity have the next code */
    NAN_CODE = 2041,      /* these two are no number's upper bits here */
    INF_CODE = 2042,      /* and NEGATIVE + INF_CODE */
    LOCAL_UNITS = 1024    /* up to as many, extremes of units are first reduced within the block */
};

/* One tensor's results. Zeros are not counted: they are the elements that no code stands for. */
struct Row {
    u64 elements;
    u64 low, high;          /* of finite values: the larger, the farther out; 0 before the first */
    const double *partials; /* double [partial_count][4] */
    u32 partial_count, powers, unit_count;
    u32 bucket_count;       /* from pack_heads to pack_pairs */
    u32 counts[CODES];      /* less than 2^31 elements: none wraps */
};
struct Chunk { const char *values; u32 elements, row, part, parts; };
struct Norm { double square; u64 largest; u32 done, padding; }; /* largest: bits of a float64 */
struct Head {
    i64 count, nan, positive_inf, negative_inf, zero;
    double min, max, sums[4];
    i64 sampled, bucket_count, unit_count;
};
struct Pair { u32 count; short bucket, padding; };
struct Totals { double sums[4]; u64 low, high; };

#ifdef DTYPE

/* --- numbers ---------------------------------------------------------------------------------- */

#define FLOAT32 1
#define FLOAT64 2
#define FLOAT16 3
#define BFLOAT16 4
#define FLOAT8_E4M3FN 5
#define FLOAT8_E5M2 6

#if DTYPE == FLOAT64
typedef double Value;
typedef u64 Bits;
#define INFINITE 0x7ff0000000000000ull
#else
typedef float Value;
typedef u32 Bits;
#define INFINITE 0x7f800000u
#endif

enum {
    SIZE = DTYPE == FLOAT64 ? 8 : DTYPE == FLOAT32 ? 4 : DTYPE <= BFLOAT16 ? 2 : 1,
    VECTOR = 16 / SIZE /* elements of 16 bytes */
};

/* Two numbers in a register are compared at once, where the hardware can. */
#define PACKED ((DTYPE == FLOAT16 || DTYPE == BFLOAT16) && __CUDA_ARCH__ >= 800)

/* The lesser and the greater number, or NaN if either is NaN. */
#if defined(EMULATED) && DTYPE != FLOAT64 && __CUDA_ARCH__ >= 800
#elif PACKED
#define COMPARE(NAME, INSTRUCTION, TYPE)                                                           \
    INLINE u32 NAME(u32 a, u32 b)                                                                  \
    {                                                                                              \
        u32 result;                                                                                \
        asm(INSTRUCTION ".NaN." TYPE " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));              \
        return result;                                                                             \
    }
#if DTYPE == FLOAT16
COMPARE(lesser, "min", "f16x2")
COMPARE(greater, "max", "f16x2")
#else
COMPARE(lesser, "min", "bf16x2")
COMPARE(greater, "max", "bf16x2")
#endif
#elif DTYPE != FLOAT64 && __CUDA_ARCH__ >= 800
#define COMPARE(NAME, INSTRUCTION)                                                                 \
    INLINE float NAME(float a, float b)                                                            \
    {                                                                                              \
        float result;                                                                              \
        asm(INSTRUCTION ".NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));                   \
        return result;                                                                             \
    }
COMPARE(lesser, "min")
COMPARE(greater, "max")
#else
INLINE Value lesser(Value a, Value b) { return a < b || a != a ? a : b; }
INLINE Value greater(Value a, Value b) { return a > b || a != a ? a : b; }
#endif

#if !defined(EMULATED) && (DTYPE == FLOAT16 || DTYPE == FLOAT8_E5M2)
INLINE float half_value(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}
#endif

/* The number whose bits are the lowest ones. */
INLINE Value value_of(Bits bits)
{
#if DTYPE == FLOAT64
    return __longlong_as_double((i64)bits);
#elif DTYPE == FLOAT32
    return __uint_as_float(bits);
#elif DTYPE == BFLOAT16
    return __uint_as_float(bits << 16);
#elif DTYPE == FLOAT16
    return half_value(bits);
#elif DTYPE == FLOAT8_E5M2
    return half_value((bits & 0xff) << 8);
#else /* the exponent's bias is 120 less than that of float32; 0x7f is NaN, and nothing infinite */
    u32 magnitude = bits & 0x7f;
    float value = __uint_as_float(magnitude << 20) * __uint_as_float((127 + 120) << 23);
    u32 sign = (bits & 0x80) << 24;
    return __uint_as_float(sign | (magnitude == 0x7f ? 0x7fc00000 : __float_as_uint(value)));
#endif
}

INLINE void values_of(uint4 vector, Value *values)
{
    u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
#if DTYPE == FLOAT64
        values[i] = value_of(words[2 * i] | (u64)words[2 * i + 1] << 32);
#else
        values[i] = value_of(words[i * SIZE / 4] >> i * SIZE * 8 % 32);
#endif
}

INLINE u32 ordered(float value)
{
    u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE u64 ordered(double value)
{
    u64 bits = (u64)__double_as_longlong(value);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

INLINE u32 code_of(Value value) { return (__float_as_uint((float)value) + 0x8000) >> 20; }

#if DTYPE == FLOAT64
INLINE Bits magnitude_of(Value value) { return (u64)__double_as_longlong(value) & ~0ull >> 1; }
#else
INLINE Bits magnitude_of(Value value) { return __float_as_uint(value) & 0x7fffffff; }
#endif

/* --- extremes of a thread's values ------------------------------------------------------------ */

#if PACKED
typedef u32 Extreme; /* in either half the extreme of every second element */
#define HIGHEST (DTYPE == FLOAT16 ? 0x7c007c00u : 0x7f807f80u)
#define LOWEST (HIGHEST | 0x80008000u)
INLINE Value first(Extreme pair) { return value_of(pair); }
INLINE Value second(Extreme pair) { return value_of(pair >> 16); }
INLINE Extreme in_place(Bits bits, Value, u32 odd, Extreme other)
{
    return odd ? bits << 16 | (other & 0xffff) : (bits & 0xffff) | (other & 0xffff0000);
}
#else
typedef Value Extreme;
#define HIGHEST __uint_as_float(0x7f800000)
#define LOWEST __uint_as_float(0xff800000)
INLINE Value first(Extreme value) { return value; }
INLINE Value second(Extreme value) { return value; }
INLINE Extreme in_place(Bits, Value value, u32, Extreme) { return value; }
#endif

struct Range { Extreme low = HIGHEST, high = LOWEST; };

INLINE void widen(Range &range, Range other)
{
    range.low = lesser(range.low, other.low);
    range.high = greater(range.high, other.high);
}

INLINE Range range_of(uint4 vector, const Value *values)
{
    (void)vector, (void)values;
#if PACKED
    const Extreme members[4] = {vector.x, vector.y, vector.z, vector.w};
#else
    const Extreme *members = values;
#endif
    Range range;
    range.low = range.high = members[0];
#pragma unroll
    for (int i = 1; i < (PACKED ? 4 : VECTOR); i++) {
        range.low = lesser(range.low, members[i]);
        range.high = greater(range.high, members[i]);
    }
    return range;
}

/* The bits of the largest magnitude in a range; those of NaN are above infinity. */
INLINE Bits largest_in(Range range)
{
    return max(max(magnitude_of(first(range.low)), magnitude_of(second(range.low))),
               max(magnitude_of(first(range.high)), magnitude_of(second(range.high))));
}

/* --- extremes of units ------------------------------------------------------------------------ */

/* Two codes per unit, of which the larger counts: how low and how high; NaN is beyond both. */
INLINE void raise(u32 *code, u32 to)
{
    if (*(volatile u32 *)code < to) /* as a rule it is not, and nobody has to wait */
        atomicMax(code, to);
}

INLINE void raise_unit(u32 *codes, Value low, Value high)
{
    raise(codes, low != low ? ~0u : ~ordered((float)low));
    raise(codes + 1, high != high ? ~0u : ordered((float)high));
}

/* --- taking values in ------------------------------------------------------------------------- */

/* Adds powers of a vector's finite values, in float32 first: relative to the largest, so what is lost
 * is 2^-22 of the sum of magnitudes. */
template <int POWERS> INLINE void add_powers(Value *values, Bits largest, double *sums)
{
#if DTYPE == FLOAT64
    (void)largest;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        double value = values[i], square = value * value;
        sums[0] += value;
        sums[1] += square;
        if (POWERS == 4) {
            sums[2] += square * value;
            sums[3] += square * square;
        }
    }
#else
    int exponent = 0;
    const Bits ordinary = 0x35800000, huge = 0x4e800000; /* 2^-20 to 2^30 */
    if ((DTYPE == FLOAT32 || DTYPE == BFLOAT16) && largest - ordinary >= huge - ordinary) {
        exponent = (int)max(largest >> 23, 1u) - 128; /* the largest becomes 2 to 4 */
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            values[i] *= __uint_as_float((u32)(127 - exponent) << 23);
    }
    float powers[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float value = values[i], square = value * value;
        powers[0] += value;
        powers[1] += square;
        if (POWERS == 4) {
            powers[2] = fmaf(square, value, powers[2]);
            powers[3] = fmaf(square, square, powers[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < POWERS; i++) {
        double power = powers[i];
        if (exponent)
            power *= __longlong_as_double((i64)(1023 + (i + 1) * exponent) << 52);
        sums[i] += power;
    }
#endif
}

/* What a thread has seen. */
struct Seen {
    double sums[4] = {0, 0, 0, 0};
    Range range;
};

/* One value; "odd" says in which half of a pair its unit is, "codes" are that unit's or NULL. */
template <int POWERS>
INLINE void take_one(Bits bits, u32 odd, Seen &seen, u32 *counts, u32 *codes)
{
    Value value = value_of(bits);
    if (magnitude_of(value) >= INFINITE) {
        atomicAdd(&counts[value != value ? NAN_CODE : INF_CODE + (value < 0 ? NEGATIVE : 0)], 1u);
        if (codes)
            raise_unit(codes, value, value);
        return;
    }
    if (value != 0)
        atomicAdd(&counts[code_of(value)], 1u);
    Range range;
    range.low = in_place(bits, value, odd, HIGHEST);
    range.high = in_place(bits, value, odd, LOWEST);
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
INLINE Bits next_of(uint4 &vector)
{
    u32 x = vector.x, y = vector.y, z = vector.z, w = vector.w;
#if DTYPE == FLOAT64
    vector = make_uint4(z, w, x, y);
    return x | (u64)y << 32;
#elif DTYPE == FLOAT32
    vector = make_uint4(y, z, w, x);
    return x;
#else
    const u32 bits = SIZE * 8;
    vector = make_uint4(__funnelshift_r(x, y, bits), __funnelshift_r(y, z, bits),
                        __funnelshift_r(z, w, bits), __funnelshift_r(w, x, bits));
    return x & ((1u << bits) - 1);
#endif
}

/* A vector; every second element is of the next unit if "paired". Zeros, half of all behind a ReLU,
 * would wait for each other in the histogram. */
template <int POWERS>
INLINE void take(uint4 vector, Seen &seen, u32 *counts, u32 *codes, bool paired)
{
    Value values[VECTOR];
    values_of(vector, values);
    Range range = range_of(vector, values);
    Bits largest = largest_in(range);
    if (largest >= INFINITE) {
#pragma unroll 1
        for (u32 i = 0; i < VECTOR; i++) {
            u32 odd = i & paired;
            take_one<POWERS>(next_of(vector), odd, seen, counts, codes ? codes + 2 * odd : codes);
        }
        return;
    }
    widen(seen.range, range);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (values[i] != 0)
            atomicAdd(&counts[code_of(values[i])], 1u);
    add_powers<POWERS>(values, largest, seen.sums);
}

/* --- reading ---------------------------------------------------------------------------------- */

INLINE Bits load_one(const char *at)
{
    return SIZE == 8 ? __ldg((const u64 *)at)
           : SIZE == 4 ? __ldg((const u32 *)at)
           : SIZE == 2 ? __ldg((const u16 *)at) : __ldg((const u8 *)at);
}

/* Takes every "stride"-th vector; the next two are under way meanwhile, unless its sixteen values leave
 * no registers for them. */
template <class Load, class Take>
INLINE void stream(u32 i, u32 end, u32 stride, Load load, Take take_vector)
{
    if (SIZE == 1) {
        for (; i < end; i += stride)
            take_vector(load(i));
        return;
    }
    uint4 next = make_uint4(0, 0, 0, 0), later = next;
    if (i < end)
        next = load(i);
    if (i + stride < end)
        later = load(i + stride);
    for (; i < end; i += stride) {
        uint4 now = next;
        next = later;
        if (i + 2 * stride < end)
            later = load(i + 2 * stride);
        take_vector(now);
    }
}

/* Takes the share of one of several threads in values anywhere: what lies before the first and behind
 * the last whole 16 bytes is taken one by one. */
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

/* A thread's values, and in lane 0 those of its warp. */
INLINE Totals warp_totals(const Seen &seen)
{
    Totals totals;
    Value low[] = {first(seen.range.low), second(seen.range.low)};
    Value high[] = {first(seen.range.high), second(seen.range.high)};
    totals.low = ~ordered((double)(low[0] < low[1] ? low[0] : low[1]));
    totals.high = ordered((double)(high[0] > high[1] ? high[0] : high[1]));
    for (int i = 0; i < 4; i++)
        totals.sums[i] = seen.sums[i];
    for (u32 lanes = 16; lanes; lanes /= 2) {
        for (int i = 0; i < 4; i++)
            totals.sums[i] += __shfl_down_sync(~0u, totals.sums[i], lanes);
        totals.low = max(totals.low, __shfl_down_sync(~0u, totals.low, lanes));
        totals.high = max(totals.high, __shfl_down_sync(~0u, totals.high, lanes));
    }
    return totals;
}

INLINE void write_totals(const Totals &totals, Row *row, double *partial)
{
    for (int i = 0; i < 4; i++)
        partial[i] = totals.sums[i];
    atomicMax(&row->low, totals.low);
    atomicMax(&row->high, totals.high);
}

/* Writes what a block has seen. All of its threads call this. */
INLINE void write_block(const Seen &seen, const u32 *counts, Row *row, double *partial)
{
    __shared__ Totals warps[WARPS];
    Totals totals = warp_totals(seen);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = totals;
    __syncthreads();
    for (u32 i = threadIdx.x; i < CODES; i += THREADS)
        if (counts[i])
            atomicAdd(&row->counts[i], counts[i]);
    if (threadIdx.x)
        return;
    for (int warp = 1; warp < WARPS; warp++) {
        for (int i = 0; i < 4; i++)
            totals.sums[i] += warps[warp].sums[i];
        totals.low = max(totals.low, warps[warp].low);
        totals.high = max(totals.high, warps[warp].high);
    }
    write_totals(totals, row, partial);
}

INLINE void describe(Row *row, const double *partials, u32 partial_count, u32 powers, u32 unit_count)
{
    row->partials = partials;
    row->partial_count = partial_count;
    row->powers = powers;
    row->unit_count = unit_count;
}

INLINE void clear(u32 *words, u32 size)
{
    for (u32 i = threadIdx.x; i < size; i += THREADS)
        words[i] = 0;
}

/* --- one tensor ------------------------------------------------------------------------------- */

/* [outer, units]: a thread keeps to a column, or to two if a word holds two numbers, and takes every
 * "rows"-th row; a vector is made of several rows, whose threads side by side read whole lines. */
template <int POWERS>
INLINE void take_columns(const char *values, u32 elements, u32 units, Seen &seen, u32 *counts,
                         u32 *codes)
{
    const bool paired = PACKED && units % 2 == 0 && (u64)values % 4 == 0;
    const u32 columns = paired ? units / 2 : units, outer = elements / units;
    const u32 each = SIZE >= 4 || paired ? 1 : 4 / SIZE; /* rows that a word holds */
    const u32 deep = SIZE == 8 ? 2 : 4 * each;           /* rows that a vector holds */
    const u32 me = blockIdx.x * THREADS + threadIdx.x, rows = gridDim.x * THREADS / columns;
    const u32 column = me % columns * (paired ? 2 : 1), row = me / columns;
    if (row >= rows || row >= outer)
        return;
    const char *mine = values + ((u64)row * units + column) * SIZE;
    const u64 step = (u64)rows * units * SIZE;
    const u32 count = (outer - row + rows - 1) / rows, vectors = count / deep; /* of my rows */
    u32 *my_codes = codes + 2 * column;
    stream(0, vectors, 1, [&](u32 i) {
        const char *at = mine + i * deep * step;
#if DTYPE == FLOAT64
        u64 a = load_one(at), b = load_one(at + step);
        return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
#else
        u32 words[4];
#pragma unroll
        for (u32 word = 0; word < 4; word++)
            if (SIZE == 4 || paired) {
                words[word] = __ldg((const u32 *)(at + word * step));
            } else {
                words[word] = 0;
#pragma unroll
                for (u32 part = 0; part < 4 / SIZE; part++)
                    words[word] |= load_one(at + (word * (4 / SIZE) + part) * step)
                                   << part * SIZE * 8;
            }
        return make_uint4(words[0], words[1], words[2], words[3]);
#endif
    }, [&](uint4 vector) { take<POWERS>(vector, seen, counts, my_codes, paired); });
#pragma unroll 1
    for (u32 i = vectors * deep * (paired ? 2 : 1); i < count * (paired ? 2 : 1); i++) {
        u32 odd = i & paired;
        take_one<POWERS>(load_one(mine + (paired ? i / 2 : i) * step + odd * SIZE), odd, seen,
                         counts, my_codes + 2 * odd);
    }
    raise_unit(my_codes, first(seen.range.low), first(seen.range.high));
    if (paired)
        raise_unit(my_codes + 2, second(seen.range.low), second(seen.range.high));
    else if (PACKED)
        raise_unit(my_codes, second(seen.range.low), second(seen.range.high));
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
                  [&](uint4 vector) { take<POWERS>(vector, seen, counts, my_codes, false); },
                  [&](Bits bits) { take_one<POWERS>(bits, 0, seen, counts, my_codes); });
        for (u32 offset = lanes / 2; offset; offset /= 2) {
            Range other;
            other.low = __shfl_xor_sync(~0u, seen.range.low, offset);
            other.high = __shfl_xor_sync(~0u, seen.range.high, offset);
            widen(seen.range, other);
        }
        if (lane == 0 && run < runs) {
            raise_unit(my_codes, first(seen.range.low), first(seen.range.high));
            if (PACKED)
                raise_unit(my_codes, second(seen.range.low), second(seen.range.high));
        }
        widen(seen.range, before);
    }
}

/* inner: 0 without units, 1 if they are the last axis. */
template <int POWERS, bool UNITS, bool LAST>
INLINE void measure(const char *values, u32 elements, Row *row, double *partials, u32 *extremes,
                    u32 units, u32 inner)
{
    __shared__ u32 counts[CODES];
    Seen seen;
    clear(counts, CODES);
    if (UNITS) {
        __shared__ u32 local[2 * LOCAL_UNITS];
        const bool few = units <= LOCAL_UNITS;
        if (few)
            clear(local, 2 * units);
        __syncthreads();
        u32 *codes = few ? local : extremes;
        if (LAST)
            take_columns<POWERS>(values, elements, units, seen, counts, codes);
        else
            take_runs<POWERS>(values, elements, units, inner, seen, counts, codes);
        __syncthreads();
        if (few)
            for (u32 i = threadIdx.x; i < 2 * units; i += THREADS)
                raise(&extremes[i], local[i]);
    } else {
        __syncthreads();
        sweep(values, elements, blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS,
              [&](uint4 vector) { take<POWERS>(vector, seen, counts, 0, false); },
              [&](Bits bits) { take_one<POWERS>(bits, 0, seen, counts, 0); });
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        row->elements = elements;
        describe(row, partials, gridDim.x, POWERS, UNITS ? units : 0);
    }
    write_block(seen, counts, row, partials + 4 * (u64)blockIdx.x);
}

/* --- many tensors ----------------------------------------------------------------------------- */

template <int POWERS>
INLINE void measure_many(const Chunk *chunks, u32 large, u32 count, Row *rows, double *partials)
{
    __shared__ u32 counts[CODES];
    const bool whole_block = blockIdx.x < large;
    const u32 place = whole_block ? blockIdx.x
                                  : large + (blockIdx.x - large) * WARPS + threadIdx.x / 32;
    if (place >= count) /* the same for all threads of a warp, and of a block with a barrier */
        return;
    const Chunk chunk = chunks[place];
    Row *row = rows + chunk.row;
    double *partial = partials + 4 * (u64)place;
    const bool first_thread = threadIdx.x % (whole_block ? THREADS : 32) == 0;
    if (chunk.part == 0 && first_thread)
        describe(row, partial, chunk.parts, POWERS, 0);
    Seen seen;
    if (whole_block) {
        clear(counts, CODES);
        __syncthreads();
        sweep(chunk.values, chunk.elements, threadIdx.x, THREADS,
              [&](uint4 vector) { take<POWERS>(vector, seen, counts, 0, false); },
              [&](Bits bits) { take_one<POWERS>(bits, 0, seen, counts, 0); });
        write_block(seen, counts, row, partial);
    } else {
        sweep(chunk.values, chunk.elements, threadIdx.x % 32, 32,
              [&](uint4 vector) { take<POWERS>(vector, seen, row->counts, 0, false); },
              [&](Bits bits) { take_one<POWERS>(bits, 0, seen, row->counts, 0); });
        Totals totals = warp_totals(seen);
        if (first_thread)
            write_totals(totals, row, partial);
    }
    if (first_thread)
        atomicAdd(&row->elements, (u64)chunk.elements);
}

INLINE double sum_of(double sum)
{
    for (u32 lanes = 16; lanes; lanes /= 2)
        sum += __shfl_down_sync(~0u, sum, lanes);
    return sum;
}

KERNEL norms(const Chunk *chunks, Norm *norms, double *partials)
{
    __shared__ double warps[WARPS];
    __shared__ bool last;
    const Chunk chunk = chunks[blockIdx.x];
    Norm *norm = norms + chunk.row;
    double sums[4] = {0, 0, 0, 0};
    Bits largest = 0;
    auto take_squares = [&](uint4 vector) {
        Value values[VECTOR];
        values_of(vector, values);
        Bits most = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            most = max(most, magnitude_of(values[i]));
        largest = max(largest, most);
        if (most < INFINITE)
            add_powers<2>(values, most, sums);
    };
    sweep(chunk.values, chunk.elements, threadIdx.x, THREADS, take_squares, [&](Bits bits) {
        double value = value_of(bits);
        Bits most = magnitude_of((Value)value);
        largest = max(largest, most);
        if (most < INFINITE)
            sums[1] += value * value;
    });
#if DTYPE == FLOAT64
    u64 wide = largest;
#else
    u64 wide = (u64)__double_as_longlong((double)__uint_as_float(largest));
#endif
    if (wide >= 0x7ff0000000000000ull) /* infinity or NaN, which is then the sum of squares, too */
        sums[1] = __longlong_as_double((i64)wide);
    double square = sum_of(sums[1]);
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
        __threadfence();
        last = atomicAdd(&norm->done, 1u) == chunk.parts - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x >= 32) /* the tensor's last block adds all partial sums, in order */
        return;
    const volatile double *parts = partials + (blockIdx.x - chunk.part);
    square = 0;
    for (u32 i = threadIdx.x; i < chunk.parts; i += 32)
        square += parts[i];
    square = sum_of(square);
    if (threadIdx.x == 0)
        norm->square = square;
}

#define VARIANTS(POWERS)                                                                           \
    KERNEL measure_##POWERS(const char *values, u32 elements, Row *row, double *partials)          \
    {                                                                                              \
        measure<POWERS, false, false>(values, elements, row, partials, 0, 0, 0);                   \
    }                                                                                              \
    KERNEL measure_last_##POWERS(const char *values, u32 elements, Row *row, double *partials,     \
                                 u32 *extremes, u32 units)                                         \
    {                                                                                              \
        measure<POWERS, true, true>(values, elements, row, partials, extremes, units, 1);          \
    }                                                                                              \
    KERNEL measure_middle_##POWERS(const char *values, u32 elements, Row *row, double *partials,   \
                                   u32 *extremes, u32 units, u32 inner)                            \
    {                                                                                              \
        measure<POWERS, true, false>(values, elements, row, partials, extremes, units, inner);     \
    }                                                                                              \
    KERNEL measure_many_##POWERS(const Chunk *chunks, u32 large, u32 count, Row *rows,             \
                                 double *partials)                                                 \
    {                                                                                              \
        measure_many<POWERS>(chunks, large, count, rows, partials);                                \
    }
VARIANTS(2)
VARIANTS(4)

#else

/* --- packing ---------------------------------------------------------------------------------- */

INLINE double not_a_number() { return __longlong_as_double(0x7ff8000000000000); }

INLINE double from_ordered(u64 code)
{
    return __longlong_as_double((i64)(code >> 63 ? code ^ 1ull << 63 : ~code));
}

/* Adds a number of each thread; every one gets the sum, and what the threads before it have. */
INLINE u32 sum_in_block(u32 mine, u32 *before)
{
    __shared__ u32 warps[WARPS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 upto = mine, total = 0;
    for (u32 lanes = 1; lanes < 32; lanes *= 2) {
        u32 other = __shfl_up_sync(~0u, upto, lanes);
        upto += lane < lanes ? 0 : other;
    }
    __syncthreads(); /* the sum before has been read */
    if (lane == 31)
        warps[warp] = upto;
    __syncthreads();
    *before = upto - mine;
    for (u32 i = 0; i < WARPS; i++) {
        *before += i < warp ? warps[i] : 0;
        total += warps[i];
    }
    return total;
}

/* How many values a signed bucket holds, zeros aside. */
INLINE u32 count_in(const Row *row, int bucket)
{
    const u32 *counts = row->counts + (bucket < 0 ? NEGATIVE - bucket : bucket);
    if (bucket == 0)
        return counts[0] + counts[NEGATIVE];
    return counts[0] + (bucket == LAST_BUCKET || bucket == -LAST_BUCKET ? counts[1] : 0);
}

KERNEL pack_heads(Row *rows, Head *heads, const u32 *codes, float *extremes, u64 code_count)
{
    __shared__ double sums[4];
    Row *row = rows + blockIdx.x;
    u32 filled = 0, counted = 0, unused;
    for (u32 i = threadIdx.x; i < CODES; i += THREADS) {
        counted += row->counts[i];
        int bucket = (int)i - LAST_BUCKET;
        filled += bucket && bucket <= LAST_BUCKET && count_in(row, bucket);
    }
    filled = sum_in_block(filled, &unused);
    counted = sum_in_block(counted, &unused);
    const u32 lane = threadIdx.x % 32;
    for (u32 power = threadIdx.x / 32; power < 4; power += WARPS) {
        double sum = 0;
        for (u32 i = lane; i < row->partial_count; i += 32)
            sum += row->partials[4 * (u64)i + power];
        for (u32 lanes = 16; lanes; lanes /= 2)
            sum += __shfl_down_sync(~0u, sum, lanes);
        if (lane == 0)
            sums[power] = power < row->powers ? sum : not_a_number();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        Head head;
        const u32 *counts = row->counts;
        head.count = (i64)row->elements;
        head.nan = counts[NAN_CODE];
        head.positive_inf = counts[INF_CODE];
        head.negative_inf = counts[NEGATIVE + INF_CODE];
        head.zero = head.count - counted;
        bool any = head.count > head.nan + head.positive_inf + head.negative_inf;
        head.min = any ? from_ordered(~row->low) : not_a_number();
        head.max = any ? from_ordered(row->high) : not_a_number();
        for (int i = 0; i < 4; i++)
            head.sums[i] = sums[i];
        head.sampled = -1;
        head.bucket_count = row->bucket_count = filled + (head.zero || count_in(row, 0));
        head.unit_count = row->unit_count;
        heads[blockIdx.x] = head;
    }
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < code_count;
         i += (u64)gridDim.x * THREADS) {
        u32 code = i % 2 ? codes[i] : ~codes[i];
        bool nan = codes[i] == ~0u;
        u32 bits = code >> 31 ? code ^ 0x80000000u : ~code;
        extremes[i] = __uint_as_float(nan ? 0x7fc00000 : bits);
    }
}

KERNEL pack_pairs(const Row *rows, Head *heads, Pair *pairs, u32 capacity)
{
    enum { EACH = (2 * LAST_BUCKET + THREADS) / THREADS }; /* buckets of a thread, side by side */
    const Row *row = rows + blockIdx.x;
    Head *head = heads + blockIdx.x;
    u32 counts[EACH], earlier = 0, filled = 0, place;
    for (u32 i = threadIdx.x; i < blockIdx.x; i += THREADS)
        earlier += rows[i].bucket_count;
    earlier = sum_in_block(earlier, &place);
    const int first = (int)(threadIdx.x * EACH) - LAST_BUCKET;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int bucket = first + i;
        counts[i] = bucket > LAST_BUCKET ? 0 : count_in(row, bucket);
        if (bucket == 0)
            counts[i] += (u32)head->zero;
        filled += counts[i] > 0;
    }
    sum_in_block(filled, &place);
    if ((u64)earlier + row->bucket_count > capacity) {
        if (threadIdx.x == 0) {
            head->bucket_count = 0;
            head->sampled = -2;
        }
        return;
    }
    Pair *next = pairs + earlier + place;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (counts[i]) {
            Pair pair = {counts[i], (short)(first + i), 0};
            *next++ = pair;
        }
}

#endif

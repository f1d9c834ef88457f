/* The statistics of a tensor's values, in a single read of its memory.
 *
 * Values come in blocks that stay in a core's first-level cache while they are added up, compared
 * and counted. Sums are those of float64 numbers throughout: the fourth power of a small gradient
 * would vanish in float32, and no power here of a float32 number overflows. A non-finite value makes
 * the sum of a block's squares non-finite; the block is then read again, value by value. The order of
 * additions is fixed, so results do not depend on addresses; the compiler vectorizes them. The
 * floating-point state of the process does not change.
 *
 * The module uses Python's limited API only, and reads memory by its address, without the headers of
 * PyTorch or NumPy. _native.pyi documents the functions.
 */

/* GCC would use MMX registers where it has no AVX, and leave them in use: all x87 arithmetic of the
 * process, such as fmod() and long double, would return NaN from then on. This comes before Python.h:
 * GCC inlines the functions of a header only into code with the same target, and Python 3.13 requires
 * some of its functions to be inlined. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("no-mmx")
#endif

#ifdef Py_GIL_DISABLED
#undef Py_LIMITED_API
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"

#if defined(_MSC_VER)
#define INLINE static __forceinline
#define NOT_INLINE static __declspec(noinline)
#else
#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE static __attribute__((noinline))
#endif

/* Request vectorization of a loop. MSVC has no such pragma; Clang would unroll the loop first. */
#if defined(_MSC_VER)
#define SIMD
#define SIMD_EXTREMES
#else
#if defined(__clang__)
#define SIMD _Pragma("clang loop vectorize(enable) unroll(disable)")
#else
#define SIMD _Pragma("omp simd")
#endif
#define SIMD_EXTREMES _Pragma("omp simd reduction(min:low) reduction(max:high)")
#endif

/* Prefetch memory; the address may be invalid. */
#if defined(_MSC_VER)
#define PREFETCH(ADDRESS) ((void)(ADDRESS))
#else
#define PREFETCH(ADDRESS) __builtin_prefetch((const void *)(ADDRESS))
#endif

enum {
    BLOCK = 2048,        /* values */
    LANES = 16,          /* sums that are made at the same time, at most: see Kernels */
    CODES = 4096,        /* the upper 12 bits of a float32 number: see bucket_indices in buckets.py */
    NEGATIVE = 2048,     /* where the codes of negative numbers begin */
    LAST_BUCKET = 2039,  /* the next would be that of infinity */
    TABLES = 4,          /* equal values one after the other would wait for each other's count */
    TABLE = CODES + 32,  /* not a multiple of 4 KiB apart, which processors mistake for the same */
    FEW = 8192,          /* values for which clearing several tables takes longer than waiting */
    CHUNK = 64,          /* codes of which is seen at once whether any occurs */
    RUN = 16,            /* values that a sample takes together */
    GIL_KEPT = 16384,    /* values that take less time than getting the GIL back may */
    SHORT_ROW = 128,     /* values of a unit in a row below which rows are compared as a whole */
    LONG_ROW = 512,      /* values of all units together; less are compared several times at once */
    WIDE_ROW = 65536     /* values of all units together, up to which their extremes stay in cache */
};

typedef struct {
    const char *values;
    int64_t count;
    int dtype;
} Tensor;

/* Results of a tensor: HEAD and PAIR of records/rows.py. */
typedef struct {
    int64_t count, nan, positive_inf, negative_inf, zero;
    double min, max;
    double sums[4]; /* of the first to fourth powers */
    int64_t sampled, bucket_count, unit_count;
} Head;

typedef struct {
    uint32_t count;
    int16_t bucket, unused;
} Pair;

/* Moments of every LANES-th value each, which are put together at the end. */
typedef struct {
    int64_t nan, positive_inf, negative_inf, zeros[LANES];
    double lows[LANES], highs[LANES];
    double sums[4][LANES];
} Lanes;

/* One block's values: as float32 and, where that would round them, as float64, too. */
typedef struct {
    const float *narrow;
    const double *wide; /* or NULL */
    uintptr_t next;     /* where the next block begins, if there is one */
    int size;           /* bytes of a value there */
    float narrow_memory[BLOCK];
    double wide_memory[BLOCK];
    double aligned_memory[BLOCK];
} Block;

/* --- reading ---------------------------------------------------------------------------------- */

INLINE int item_size(int dtype)
{
    switch (dtype) {
    case '?': case 'b': case 'B': case '4': case '5':
        return 1;
    case 'e': case 'E': case 'h': case 'H':
        return 2;
    case 'f': case 'i': case 'I':
        return 4;
    case 'd': case 'q': case 'Q':
        return 8;
    default:
        return 0;
    }
}

INLINE float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float from_float16(uint16_t half)
{
    uint32_t magnitude = half & 0x7FFF, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t denormal = to_bits((float)(int32_t)magnitude * (1.0f / (1 << 24)));
    uint32_t bits = (magnitude << 13) + (magnitude < 0x7C00 ? 112u << 23 : 224u << 23);
    return from_bits(sign | (magnitude < 0x0400 ? denormal : bits));
}

INLINE float from_float8_e4m3fn(uint8_t x)
{
    uint32_t magnitude = x & 0x7F, sign = (uint32_t)(x & 0x80) << 24;
    uint32_t denormal = to_bits((float)(int32_t)magnitude * (1.0f / (1 << 9)));
    uint32_t bits = magnitude == 0x7F ? 0x7FC00000 : (magnitude << 20) + (120u << 23);
    return from_bits(sign | (magnitude < 0x08 ? denormal : bits));
}

#define CONVERT(TYPE, TARGET, EXPRESSION)              \
    do {                                               \
        const TYPE *source = (const TYPE *)values;     \
        for (int i = 0; i < count; i++) {              \
            TYPE x = source[i];                        \
            TARGET[i] = EXPRESSION;                    \
        }                                              \
    } while (0)

INLINE void read_block(const Tensor *tensor, int64_t first, int count, Block *block)
{
    int size = item_size(tensor->dtype);
    const char *values = tensor->values + first * size;
    float *__restrict narrow = block->narrow_memory;
    double *__restrict wide = block->wide_memory;
    block->size = size;
    block->next = (uintptr_t)values + (uintptr_t)BLOCK * (uintptr_t)size;
    if ((uintptr_t)values % (uintptr_t)size) {
        memcpy(block->aligned_memory, values, (size_t)count * (size_t)size);
        values = (const char *)block->aligned_memory;
    }
    block->narrow = narrow;
    block->wide = NULL;
    switch (tensor->dtype) {
    case 'f':
        block->narrow = (const float *)values;
        return;
    case 'e':
        CONVERT(uint16_t, narrow, from_float16(x));
        return;
    case 'E':
        CONVERT(uint16_t, narrow, from_bits((uint32_t)x << 16));
        return;
    case '4':
        CONVERT(uint8_t, narrow, from_float8_e4m3fn(x));
        return;
    case '5':
        CONVERT(uint8_t, narrow, from_float16((uint16_t)(x << 8)));
        return;
    case '?':
        CONVERT(uint8_t, narrow, (float)(x != 0));
        return;
    case 'b':
        CONVERT(int8_t, narrow, x);
        return;
    case 'B':
        CONVERT(uint8_t, narrow, x);
        return;
    case 'h':
        CONVERT(int16_t, narrow, x);
        return;
    case 'H':
        CONVERT(uint16_t, narrow, x);
        return;
    case 'd':
        block->wide = (const double *)values;
        break;
    case 'i':
        CONVERT(int32_t, wide, x);
        block->wide = wide;
        break;
    case 'I':
        CONVERT(uint32_t, wide, x);
        block->wide = wide;
        break;
    case 'q':
        CONVERT(int64_t, wide, (double)x);
        block->wide = wide;
        break;
    default:
        CONVERT(uint64_t, wide, (double)x);
        block->wide = wide;
        break;
    }
    values = (const char *)block->wide;
    CONVERT(double, narrow, (float)x);
}

/* --- moments ---------------------------------------------------------------------------------- */

INLINE int is_finite(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits << 1) < (0x7FFull << 53);
}

INLINE int is_nan(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits << 1) > (0x7FFull << 53);
}

/* Hardware prefetches within a page, but not the first lines of the next one. */
INLINE void fetch_next(const Block *block, int i)
{
    PREFETCH(block->next + (uintptr_t)i * (uintptr_t)block->size);
}

/* Add values that are all finite, a multiple of LANES; if they are not, do nothing and return 0.
 * ``width`` sums are made at the same time. */
#define DEFINE_ADD_FINITE(NAME, TYPE, BITS, MAGNITUDE)                                 \
    INLINE int NAME(const Block *block, const TYPE *values, int count, int powers,     \
                    int width, Lanes *lanes)                                           \
    {                                                                                  \
        double sums[4][LANES] = {{0}};                                                 \
        TYPE lows[LANES], highs[LANES];                                                \
        BITS zeros[LANES] = {0};                                                       \
        int all_finite = 1;                                                            \
        for (int j = 0; j < width; j++) {                                              \
            lows[j] = INFINITY;                                                        \
            highs[j] = -INFINITY;                                                      \
        }                                                                              \
        for (int i = 0; i < count; i += width) {                                       \
            fetch_next(block, i);                                                      \
            SIMD for (int j = 0; j < width; j++)                                       \
            {                                                                          \
                TYPE x = values[i + j];                                                \
                BITS bits;                                                             \
                memcpy(&bits, &x, sizeof bits);                                        \
                double wide = x, square = wide * wide;                                 \
                sums[0][j] += wide;                                                    \
                sums[1][j] += square;                                                  \
                if (powers == 4) {                                                     \
                    sums[2][j] += square * wide;                                       \
                    sums[3][j] += square * square;                                     \
                }                                                                      \
                lows[j] = x < lows[j] ? x : lows[j];                                   \
                highs[j] = x > highs[j] ? x : highs[j];                                \
                zeros[j] += (bits & MAGNITUDE) == 0;                                   \
            }                                                                          \
        }                                                                              \
        for (int j = 0; j < width; j++)                                                \
            all_finite &= is_finite(sums[1][j]);                                       \
        for (int j = 0; all_finite && j < width; j++) {                                \
            for (int power = 0; power < powers; power++)                               \
                lanes->sums[power][j] += sums[power][j];                               \
            lanes->lows[j] = lows[j] < lanes->lows[j] ? lows[j] : lanes->lows[j];      \
            lanes->highs[j] = highs[j] > lanes->highs[j] ? highs[j] : lanes->highs[j]; \
            lanes->zeros[j] += (int64_t)zeros[j];                                      \
        }                                                                              \
        return all_finite;                                                             \
    }

DEFINE_ADD_FINITE(add_finite_floats, float, uint32_t, (UINT32_MAX >> 1))
DEFINE_ADD_FINITE(add_finite_doubles, double, uint64_t, (UINT64_MAX >> 1))

INLINE double value_of(const Block *block, int i)
{
    return block->wide ? block->wide[i] : (double)block->narrow[i];
}

/* Add values one by one; whether all were finite. */
INLINE int add_each(const Block *block, int first, int end, Lanes *lanes)
{
    int all_finite = 1;
    double sums[4] = {0};
    for (int i = first; i < end; i++) {
        double x = value_of(block, i), power = x;
        if (!is_finite(x)) {
            all_finite = 0;
            int64_t *infinite = x > 0 ? &lanes->positive_inf : &lanes->negative_inf;
            *(is_nan(x) ? &lanes->nan : infinite) += 1;
            continue;
        }
        for (int n = 0; n < 4; n++, power *= x)
            sums[n] += power;
        lanes->zeros[0] += x == 0;
        lanes->lows[0] = x < lanes->lows[0] ? x : lanes->lows[0];
        lanes->highs[0] = x > lanes->highs[0] ? x : lanes->highs[0];
    }
    for (int n = 0; n < 4; n++)
        lanes->sums[n][0] += sums[n];
    return all_finite;
}

INLINE int add_moments(const Block *block, int count, int powers, int width, Lanes *lanes)
{
    int whole = count / LANES * LANES;
    int all_finite = block->wide   ? add_finite_doubles(block, block->wide, whole, 4, width, lanes)
                     : powers == 4 ? add_finite_floats(block, block->narrow, whole, 4, width, lanes)
                                   : add_finite_floats(block, block->narrow, whole, 2, width, lanes);
    if (!all_finite)
        all_finite = add_each(block, 0, whole, lanes);
    return add_each(block, whole, count, lanes) && all_finite;
}

INLINE void clear_lanes(Lanes *lanes)
{
    memset(lanes, 0, sizeof *lanes);
    for (int j = 0; j < LANES; j++) {
        lanes->lows[j] = INFINITY;
        lanes->highs[j] = -INFINITY;
    }
}

INLINE void total_lanes(const Lanes *lanes, Head *head)
{
    head->nan = lanes->nan;
    head->positive_inf = lanes->positive_inf;
    head->negative_inf = lanes->negative_inf;
    head->min = INFINITY;
    head->max = -INFINITY;
    for (int j = 0; j < LANES; j++) {
        head->zero += lanes->zeros[j];
        head->min = lanes->lows[j] < head->min ? lanes->lows[j] : head->min;
        head->max = lanes->highs[j] > head->max ? lanes->highs[j] : head->max;
        for (int power = 0; power < 4; power++)
            head->sums[power] += lanes->sums[power][j];
    }
}

/* --- histogram -------------------------------------------------------------------------------- */

typedef struct {
    uint32_t *tables[TABLES]; /* how often each code occurs: all the same one for few values */
    uint32_t memory[TABLES][TABLE];
} Histogram;

/* Half a bfloat16 unit, and a shift: see bucket_indices in buckets.py. */
INLINE uint32_t code_of(float x)
{
    return (to_bits(x) + 0x8000) >> 20;
}

/* Not vectorized: taking codes out of vectors again costs more than making them. */
NOT_INLINE void count_codes(const Block *block, int first, int end, int all_finite,
                            Histogram *histogram)
{
    uint32_t *a = histogram->tables[0], *b = histogram->tables[1];
    uint32_t *c = histogram->tables[2], *d = histogram->tables[3];
    const float *x = block->narrow + first, *last = block->narrow + end;
    if (all_finite)
        for (; last - x >= TABLES; x += TABLES) {
            a[code_of(x[0])]++;
            b[code_of(x[1])]++;
            c[code_of(x[2])]++;
            d[code_of(x[3])]++;
        }
    for (; x < last; x++)
        if (all_finite || is_finite(value_of(block, (int)(x - block->narrow))))
            a[code_of(*x)]++;
}

/* Count the runs of a sample that begin in a block, from ``next`` on; where the next begins. A run
 * that would leave the block ends with it. */
INLINE int64_t count_sample(const Block *block, int count, int all_finite, int64_t next,
                            int64_t step, Histogram *histogram)
{
    for (; next < count && count >= RUN; next += step) {
        int first = next + RUN <= count ? (int)next : count - RUN;
        count_codes(block, first, first + RUN, all_finite, histogram);
    }
    return next - count;
}

INLINE void clear_histogram(Histogram *histogram, int64_t count)
{
    int tables = count < FEW ? 1 : TABLES;
    memset(histogram->memory, 0, sizeof histogram->memory[0] * (size_t)tables);
    for (int i = 0; i < TABLES; i++)
        histogram->tables[i] = histogram->memory[i % tables];
}

/* Add all tables to the first one. */
INLINE uint32_t *total_histogram(Histogram *histogram)
{
    uint32_t *total = histogram->memory[0];
    if (histogram->tables[1] != total)
        for (int table = 1; table < TABLES; table++)
            for (int i = 0; i < CODES; i++)
                total[i] += histogram->memory[table][i];
    return total;
}

/* Turn counts of codes into counts of buckets: both zeros share one, and finite numbers that round to
 * infinity are in the last one. */
INLINE void merge_codes(uint32_t *counts)
{
    counts[0] += counts[NEGATIVE];
    counts[LAST_BUCKET] += counts[LAST_BUCKET + 1];
    counts[NEGATIVE + LAST_BUCKET] += counts[NEGATIVE + LAST_BUCKET + 1];
    counts[NEGATIVE] = counts[LAST_BUCKET + 1] = counts[NEGATIVE + LAST_BUCKET + 1] = 0;
}

typedef struct {
    Head head;
    Pair pairs[2 * LAST_BUCKET + 2]; /* ascending, and one that may be written behind them */
} Statistics;

/* Write the buckets that hold anything, from that next to zero's to that of an extreme value or, of
 * negative numbers, the other way; where the next pair goes. */
INLINE Pair *list_pairs(const uint32_t *counts, double extreme, int sign, Pair *next)
{
    int last = (int)(code_of((float)extreme) % NEGATIVE), chunks = last / CHUNK + 1;
    for (int n = 0; n < chunks; n++) {
        int start = (sign > 0 ? n : chunks - 1 - n) * CHUNK;
        uint32_t any = 0;
        for (int i = 0; i < CHUNK; i++)
            any |= counts[start + i];
        for (int i = 0; any && i < CHUNK; i++) {
            int bucket = start + (sign > 0 ? i : CHUNK - 1 - i);
            Pair pair = {counts[bucket], (int16_t)(sign * bucket), 0};
            *next = pair;
            next += (pair.count != 0) & (bucket > 0) & (bucket <= last);
        }
    }
    return next;
}

/* Complete the counts of a sample and return their total. The head counts zeros exactly, so bucket 0 is
 * emptied if there are any: its other values are below 1.5e-39. The buckets of the extremes always have
 * a count. */
INLINE int64_t count_sampled(uint32_t *counts, const Head *head, int64_t nonzero)
{
    int64_t taken = 0;
    double extremes[2] = {head->min, head->max};
    if (head->zero)
        counts[0] = 0;
    for (int i = 0; nonzero && i < 2; i++) {
        uint32_t code = code_of((float)extremes[i]);
        int last = (code & (NEGATIVE - 1)) > LAST_BUCKET;
        code = code == NEGATIVE ? 0 : code - (uint32_t)last;
        if (extremes[i] != 0 && counts[code] == 0)
            counts[code] = 1;
    }
    for (int i = 0; i < CODES; i++)
        taken += counts[i];
    return taken;
}

/* Fill the pairs from the counts of codes. */
INLINE void fill_pairs(uint32_t *counts, int is_sample, int64_t finite, Statistics *statistics)
{
    Head *head = &statistics->head;
    merge_codes(counts);
    head->sampled = is_sample ? count_sampled(counts, head, finite - head->zero) : -1;
    Pair *next = statistics->pairs, zero = {counts[0], 0, 0};
    if (head->min < 0)
        next = list_pairs(counts + NEGATIVE, head->min, -1, next);
    if (zero.count || head->zero)
        *next++ = zero;
    if (head->max > 0)
        next = list_pairs(counts, head->max, 1, next);
    head->bucket_count = next - statistics->pairs;
}

/* --- units ------------------------------------------------------------------------------------ */

/* Extremes of each unit of a tensor [outer, units, inner]. Where a unit has many values in a row,
 * they are compared with each other; else rows are, several at once where they are short. */
typedef struct {
    int64_t units, inner;
    int64_t width;       /* of a row that is compared as a whole; 0 if none is */
    int64_t at;          /* the next value's place in the row, or in units times inner */
    float *lows, *highs; /* of each place in a row, or of each unit */
} Units;

INLINE float lower(float x, float low)
{
    return x < low ? x : low; /* an earlier NaN stays */
}

INLINE float higher(float x, float high)
{
    return x > high ? x : high;
}

/* Allocate the extremes; 0 without memory. */
INLINE int begin_units(Units *units, int64_t count)
{
    int64_t row = units->units * units->inner, size = units->units;
    units->at = units->width = 0;
    units->lows = units->highs = NULL;
    if (units->units == 0)
        return 1;
    if (units->inner == 1 || (units->inner < SHORT_ROW && row <= WIDE_ROW && count >= 4 * row))
        size = units->width = row * (row < LONG_ROW ? LONG_ROW / row : 1);
    units->lows = malloc(2 * (size_t)size * sizeof(float));
    if (units->lows == NULL)
        return 0;
    units->highs = units->lows + size;
    for (int64_t i = 0; i < size; i++) {
        units->lows[i] = INFINITY;
        units->highs[i] = -INFINITY;
    }
    return 1;
}

INLINE void compare_each(const float *x, int count, float *lows, float *highs, int step)
{
    for (int i = 0; i < count; i++, lows += step, highs += step) {
        *lows = is_nan(x[i]) ? x[i] : lower(x[i], *lows);
        *highs = is_nan(x[i]) ? x[i] : higher(x[i], *highs);
    }
}

INLINE void compare_rows(const float *__restrict x, int count, float *__restrict lows,
                         float *__restrict highs)
{
    SIMD for (int i = 0; i < count; i++)
    {
        lows[i] = lower(x[i], lows[i]);
        highs[i] = higher(x[i], highs[i]);
    }
}

/* The same of four rows, which takes as many loads and stores of the extremes as one. */
INLINE void compare_four_rows(const float *__restrict first, int width, float *__restrict lows,
                              float *__restrict highs)
{
    const float *__restrict second = first + width, *__restrict third = second + width,
                *__restrict fourth = third + width;
    SIMD for (int i = 0; i < width; i++)
    {
        float a = first[i], b = second[i], c = third[i], d = fourth[i];
        lows[i] = lower(lower(lower(a, b), lower(c, d)), lows[i]);
        highs[i] = higher(higher(higher(a, b), higher(c, d)), highs[i]);
    }
}

/* A number that is ordered as the floats are, and back: of floats, compilers hesitate to vectorize
 * the minimum. */
INLINE int32_t to_key(float x)
{
    int32_t bits = (int32_t)to_bits(x);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

INLINE float from_key(int32_t key)
{
    return from_bits((uint32_t)(key ^ ((key >> 31) & INT32_MAX)));
}

INLINE void compare_values(const float *x, int count, float *least, float *most)
{
    int32_t low = INT32_MAX, high = INT32_MIN;
    SIMD_EXTREMES for (int i = 0; i < count; i++)
    {
        int32_t key = to_key(x[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    *least = lower(from_key(low), *least);
    *most = higher(from_key(high), *most);
}

INLINE void add_units(Units *units, const float *x, int count, int all_finite)
{
    int64_t length = units->width ? units->width : units->inner;
    int64_t end = units->width ? units->width : units->units * units->inner;
    while (count) {
        int64_t left = length - units->at % length;
        int part = left < count ? (int)left : count;
        if (all_finite && units->at == 0 && units->width && count >= 4 * units->width) {
            compare_four_rows(x, (int)units->width, units->lows, units->highs);
            x += 4 * units->width;
            count -= 4 * (int)units->width;
            continue;
        }
        int64_t place = units->width ? units->at : units->at / units->inner;
        float *lows = units->lows + place, *highs = units->highs + place;
        if (!all_finite)
            compare_each(x, part, lows, highs, units->width != 0);
        else if (units->width)
            compare_rows(x, part, lows, highs);
        else
            compare_values(x, part, lows, highs);
        x += part;
        count -= part;
        units->at = units->at + part == end ? 0 : units->at + part;
    }
}

/* Move the extremes of each unit to the front. */
INLINE void end_units(Units *units)
{
    int64_t inner = units->inner, row = units->units * inner;
    for (int64_t unit = 0; units->width && unit < units->units; unit++) {
        float low = INFINITY, high = -INFINITY;
        for (int64_t start = unit * inner; start < units->width; start += row)
            for (int64_t i = start; i < start + inner; i++) {
                low = is_nan(units->lows[i]) ? NAN : lower(units->lows[i], low);
                high = is_nan(units->highs[i]) ? NAN : higher(units->highs[i], high);
            }
        units->lows[unit] = low;
        units->highs[unit] = high;
    }
}

/* --- all of it -------------------------------------------------------------------------------- */

INLINE void measure(const Tensor *tensor, int64_t sample_step, int powers, int width, Units *units,
                    Statistics *statistics)
{
    Block block;
    Histogram histogram;
    Lanes lanes;
    Head *head = &statistics->head;
    int64_t count = tensor->count, next_sample = 0;
    memset(head, 0, sizeof *head);
    head->count = count;
    head->unit_count = units->units;
    clear_histogram(&histogram, count);
    clear_lanes(&lanes);
    for (int64_t first = 0; first < count; first += BLOCK) {
        int part = count - first < BLOCK ? (int)(count - first) : BLOCK;
        read_block(tensor, first, part, &block);
        int all_finite = add_moments(&block, part, powers, width, &lanes);
        if (sample_step)
            next_sample = count_sample(&block, part, all_finite, next_sample, sample_step,
                                       &histogram);
        else
            count_codes(&block, 0, part, all_finite, &histogram);
        if (units->units)
            add_units(units, block.narrow, part, all_finite);
    }
    total_lanes(&lanes, head);
    int64_t finite = count - head->nan - head->positive_inf - head->negative_inf;
    fill_pairs(total_histogram(&histogram), sample_step != 0, finite, statistics);
    if (finite == 0)
        head->min = head->max = NAN;
    if (powers < 4)
        head->sums[2] = head->sums[3] = NAN;
    end_units(units);
}

INLINE double sum_squares(const Block *block, int count)
{
    const float *values = block->narrow;
    double sums[LANES] = {0}, total = 0;
    for (int i = 0; i < count; i += LANES) {
        fetch_next(block, i);
        SIMD for (int j = 0; j < LANES; j++)
        {
            double x = values[i + j];
            sums[j] += x * x;
        }
    }
    for (int j = 0; j < LANES; j++)
        total += sums[j];
    return total;
}

INLINE double squared_norm(const Tensor *tensor)
{
    Block block;
    double total = 0;
    for (int64_t first = 0; first < tensor->count; first += BLOCK) {
        int part = tensor->count - first < BLOCK ? (int)(tensor->count - first) : BLOCK, i = 0;
        read_block(tensor, first, part, &block);
        if (!block.wide)
            total += sum_squares(&block, i = part / LANES * LANES);
        for (; i < part; i++)
            total += value_of(&block, i) * value_of(&block, i);
    }
    return total;
}

/* --- processors ------------------------------------------------------------------------------- */

/* Functions that are compiled for each set of instructions. */
typedef struct {
    const char *instructions;
    void (*measure)(const Tensor *, int64_t, int, Units *, Statistics *);
    double (*squared_norm)(const Tensor *);
} Kernels;

/* ``WIDTH`` sums of each power, or the registers would not hold those of four. */
#define DEFINE_KERNELS(NAME, INSTRUCTIONS, TARGET, WIDTH)                                        \
    TARGET static void measure_##NAME(const Tensor *tensor, int64_t sample_step, int powers,     \
                                      Units *units, Statistics *statistics)                      \
    {                                                                                            \
        measure(tensor, sample_step, powers, WIDTH, units, statistics);                          \
    }                                                                                            \
    TARGET static double squared_norm_##NAME(const Tensor *tensor)                               \
    {                                                                                            \
        return squared_norm(tensor);                                                             \
    }                                                                                            \
    static const Kernels NAME = {INSTRUCTIONS, measure_##NAME, squared_norm_##NAME};

DEFINE_KERNELS(baseline, "baseline", , 8)
#if defined(__x86_64__) && defined(__GNUC__)
DEFINE_KERNELS(avx2, "AVX2", __attribute__((target("avx2,fma"))), 8)
DEFINE_KERNELS(avx512, "AVX-512", __attribute__((target("avx512f"))), 16)
#endif

/* Those that this processor can execute, the fastest last; how many. */
static int find_kernels(const Kernels *found[3])
{
    int size = 0;
    found[size++] = &baseline;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found[size++] = &avx2;
    if (__builtin_cpu_supports("avx512f"))
        found[size++] = &avx512;
#endif
    return size;
}

static const Kernels *kernels;

/* --- Python ----------------------------------------------------------------------------------- */

static int fill_tensor(PyObject *address, PyObject *count, int dtype, Tensor *tensor)
{
    tensor->values = PyLong_AsVoidPtr(address);
    tensor->count = PyLong_AsLongLong(count);
    tensor->dtype = dtype;
    if (PyErr_Occurred())
        return 0;
    if (tensor->count < 0 || item_size(dtype) == 0) {
        PyErr_SetString(PyExc_ValueError, "count must not be negative, dtype one of those known");
        return 0;
    }
    return 1;
}

/* One tensor to measure, and its results. */
typedef struct {
    Tensor tensor;
    int64_t units, inner, sample_step;
    int powers;            /* whose sums are made: 2 or 4 */
    char *found[3];        /* Head, pairs and units; the first to be freed, NULL without memory */
    Py_ssize_t sizes[3];
} Request;

/* Fill a request from a tuple of integers; 0 if they do not fit each other. */
static int fill_request(PyObject *numbers, Request *request)
{
    int64_t rest[4] = {0};
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != 7) {
        PyErr_SetString(PyExc_TypeError, "tensors are tuples of 7 integers");
        return 0;
    }
    long dtype = PyLong_AsLong(PyTuple_GetItem(numbers, 2));
    for (int i = 0; i < 4; i++)
        rest[i] = PyLong_AsLongLong(PyTuple_GetItem(numbers, 3 + i));
    if (!fill_tensor(PyTuple_GetItem(numbers, 0), PyTuple_GetItem(numbers, 1), (int)dtype,
                     &request->tensor))
        return 0;
    int64_t count = request->tensor.count, units = rest[0], inner = rest[1], step = rest[2];
    if (step < 0 || units < 0 || (units && (inner < 1 || units > count / inner)) ||
        (!step && count > UINT32_MAX) || (rest[3] != 2 && rest[3] != 4)) {
        PyErr_SetString(PyExc_ValueError, "units, inner, sample_step or powers do not fit the count");
        return 0;
    }
    request->units = units;
    request->inner = inner;
    request->sample_step = step;
    request->powers = (int)rest[3];
    return 1;
}

/* Copy the results of a tensor to a request; return the memory for the extremes of units, or NULL. */
static void *keep(const Statistics *statistics, Request *request)
{
    request->sizes[0] = sizeof(Head);
    request->sizes[1] = (Py_ssize_t)((size_t)statistics->head.bucket_count * sizeof(Pair));
    request->sizes[2] = (Py_ssize_t)(2 * (size_t)statistics->head.unit_count * sizeof(float));
    char *target = malloc((size_t)(request->sizes[0] + request->sizes[1] + request->sizes[2]));
    if (target == NULL)
        return NULL;
    for (int i = 0; i < 3; target += request->sizes[i++])
        request->found[i] = target;
    memcpy(request->found[0], &statistics->head, (size_t)request->sizes[0]);
    memcpy(request->found[1], statistics->pairs, (size_t)request->sizes[1]);
    return request->found[2];
}

/* Measure one tensor. */
static void serve(Request *request)
{
    Statistics statistics;
    Units units = {.units = request->units, .inner = request->inner};
    if (!begin_units(&units, request->tensor.count))
        return;
    kernels->measure(&request->tensor, request->sample_step, request->powers, &units, &statistics);
    float *extremes = keep(&statistics, request);
    for (int64_t i = 0; extremes != NULL && i < units.units; i++) {
        extremes[2 * i] = units.lows[i];
        extremes[2 * i + 1] = units.highs[i];
    }
    free(units.lows);
}

/* Append the results of requests to the bytearrays of heads, pairs and units, and free them;
 * 0 if there was no memory: then they are unchanged. */
static int append_rows(Request *requests, Py_ssize_t size, PyObject *const *rows)
{
    int fits = !PyErr_Occurred();
    Py_ssize_t before[3];
    for (Py_ssize_t r = 0; r < size; r++)
        fits = fits && (!requests[r].tensor.count || requests[r].found[0]);
    for (int i = 0; i < 3; i++) {
        Py_ssize_t added = 0;
        for (Py_ssize_t r = 0; r < size; r++)
            added += requests[r].sizes[i];
        before[i] = PyByteArray_Size(rows[i]);
        fits = fits && PyByteArray_Resize(rows[i], before[i] + added) == 0;
        char *target = PyByteArray_AsString(rows[i]) + before[i];
        for (Py_ssize_t r = 0; fits && r < size; target += requests[r++].sizes[i])
            if (requests[r].sizes[i])
                memcpy(target, requests[r].found[i], (size_t)requests[r].sizes[i]);
    }
    for (int i = 0; !fits && i < 3; i++)
        PyByteArray_Resize(rows[i], before[i]);
    for (Py_ssize_t r = 0; r < size; r++)
        free(requests[r].found[0]);
    if (!fits && !PyErr_Occurred())
        PyErr_NoMemory();
    return fits;
}

/* Whether these are the three bytearrays to append to. */
static int are_rows(PyObject *const *rows)
{
    int fits = PyByteArray_Check(rows[0]) && PyByteArray_Check(rows[1]) && PyByteArray_Check(rows[2]);
    if (!fits)
        PyErr_SetString(PyExc_TypeError, "heads, pairs and units are bytearrays");
    return fits;
}

static PyObject *python_measure(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    Request request = {0};
    if (arg_count != 4) {
        PyErr_SetString(PyExc_TypeError, "measure() takes a tuple and three bytearrays");
        return NULL;
    }
    if (!fill_request(args[0], &request) || !are_rows(args + 1))
        return NULL;
    PyThreadState *state = request.tensor.count > GIL_KEPT ? PyEval_SaveThread() : NULL;
    serve(&request);
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (!append_rows(&request, 1, args + 1))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *python_squared_norms(PyObject *module, PyObject *const *args,
                                      Py_ssize_t arg_count)
{
    (void)module;
    Py_ssize_t size = arg_count == 3 ? PyList_Size(args[0]) : -1;
    if (size < 0 || PyList_Size(args[1]) != size || PyBytes_Size(args[2]) != size) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "squared_norms() takes two lists and bytes, as long");
        return NULL;
    }
    const char *dtypes = PyBytes_AsString(args[2]);
    PyObject *result = PyByteArray_FromStringAndSize(NULL, size * (Py_ssize_t)sizeof(double));
    Tensor *tensors = malloc(((size_t)size + 1) * sizeof(Tensor));
    int known = result != NULL && tensors != NULL;
    if (result != NULL && tensors == NULL)
        PyErr_NoMemory();
    int64_t total = 0;
    for (Py_ssize_t i = 0; known && i < size; i++) {
        known = fill_tensor(PyList_GetItem(args[0], i), PyList_GetItem(args[1], i), dtypes[i],
                            &tensors[i]);
        total += known ? tensors[i].count : 0;
    }
    if (known) {
        double *norms = (double *)(void *)PyByteArray_AsString(result);
        PyThreadState *state = total > GIL_KEPT ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t i = 0; i < size; i++)
            norms[i] = kernels->squared_norm(&tensors[i]);
        if (state != NULL)
            PyEval_RestoreThread(state);
    }
    free(tensors);
    if (!known)
        Py_CLEAR(result);
    return result;
}

/* --- PyTorch's tensors ------------------------------------------------------------------------ */

/* Describe a dense float tensor in CPU memory; 0 if it is anything else. */
static int describe_host(PyObject *object, const Exchange *exchange, PyObject *axis,
                         Values *values, Tensor *tensor)
{
    if (!describe(object, exchange, axis, values) || values->device_type != ON_CPU)
        return 0;
    tensor->values = values->values;
    tensor->count = values->count;
    tensor->dtype = values->dtype;
    return 1;
}

/* Arguments of measure_tensors(), apart from the tensors. */
typedef struct {
    PyObject *axis, *types, *sample_step;
    const Exchange *exchange;
    int powers;
} Asked;

/* Fill a request, which has no values if the tensor is to be refused; 0 if there was an error. */
static int ask(PyObject *object, const Asked *asked, Request *request)
{
    Values values;
    Tensor tensor;
    if (!asked->exchange || !is_of_type(object, asked->types) ||
        !describe_host(object, asked->exchange, asked->axis, &values, &tensor) || !tensor.count)
        return 1;
    int64_t count = tensor.count;
    request->tensor = tensor;
    request->units = values.units;
    request->inner = values.inner;
    PyObject *number = PyObject_CallFunction(asked->sample_step, "L", (long long)count);
    request->sample_step = number ? PyLong_AsLongLong(number) : -1;
    request->powers = asked->powers;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return 0;
    if (request->sample_step < 0 || (!request->sample_step && count > UINT32_MAX)) {
        PyErr_SetString(PyExc_ValueError, "the sample's step does not fit the count");
        return 0;
    }
    return 1;
}

static PyObject *python_measure_tensors(PyObject *module, PyObject *const *args,
                                        Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 9 || !PyList_Check(args[0]) || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "measure_tensors() takes a list, and 8 other arguments");
        return NULL;
    }
    Asked asked = {args[1], args[2], args[4], exchange_of(args[3]),
                   PyLong_AsLong(args[5]) == 2 ? 2 : 4};
    Py_ssize_t size = PyList_Size(args[0]);
    Request *requests = calloc((size_t)size + 1, sizeof *requests);
    if (requests == NULL)
        PyErr_NoMemory();
    int fits = !PyErr_Occurred() && are_rows(args + 6);
    int64_t total = 0;
    for (Py_ssize_t i = 0; fits && i < size; i++) {
        fits = ask(PyList_GetItem(args[0], i), &asked, &requests[i]);
        total += requests[i].tensor.count;
    }
    PyObject *measured = fits ? PyList_New(size) : NULL;
    if (measured != NULL) {
        PyThreadState *state = total > GIL_KEPT ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t i = 0; i < size; i++)
            if (requests[i].tensor.count)
                serve(&requests[i]);
        if (state != NULL)
            PyEval_RestoreThread(state);
        for (Py_ssize_t i = 0; i < size; i++)
            PyList_SetItem(measured, i, PyBool_FromLong(requests[i].tensor.count != 0));
        if (!append_rows(requests, size, args + 6))
            Py_CLEAR(measured);
    }
    free(requests);
    return measured;
}

/* --- gradients -------------------------------------------------------------------------------- */

typedef struct {
    PyObject *grad;
    Tensor tensor;
    int64_t place;
} Gradient;

/* The gradients of the parameters that ``identities`` name, in their order; how many, or -1 if there
 * are others, or a gradient is not a float tensor in CPU memory. Those found are held. */
static Py_ssize_t find_gradients(PyObject *groups, const int64_t *identities, Py_ssize_t size,
                                 PyObject *tensor_type, const Exchange *exchange, double *row,
                                 Gradient *gradients)
{
    Values values;
    Py_ssize_t found = 0, at = 0, group_count = PyList_Size(groups);
    PyObject *name = PyUnicode_InternFromString("grad");
    int fits = name != NULL;
    for (Py_ssize_t g = 0; fits && g < group_count; g++) {
        PyObject *group = PyList_GetItem(groups, g); /* borrowed, as all here but the gradients */
        PyObject *list = PyDict_Check(group) ? PyDict_GetItemString(group, "params") : NULL;
        PyObject *rate = list ? PyDict_GetItemString(group, "lr") : NULL;
        fits = list && PyList_Check(list) && rate && (PyFloat_Check(rate) || PyLong_Check(rate));
        Py_ssize_t count = fits ? PyList_Size(list) : 0;
        fits = fits && at + count <= size;
        for (Py_ssize_t i = 0; fits && i < count; i++, at++) {
            PyObject *parameter = PyList_GetItem(list, i);
            Gradient *next = &gradients[found];
            next->place = identities[2 * at + 1];
            fits = (int64_t)(intptr_t)parameter == identities[2 * at];
            next->grad = fits && next->place >= 0 ? PyObject_GetAttr(parameter, name) : NULL;
            if (next->grad == NULL || next->grad == Py_None) {
                fits = fits && (next->grad || next->place < 0);
                Py_XDECREF(next->grad);
                continue;
            }
            found++;
            fits = (PyObject *)Py_TYPE(next->grad) == tensor_type &&
                   describe_host(next->grad, exchange, Py_None, &values, &next->tensor);
        }
        row[g] = fits ? PyFloat_AsDouble(rate) : NAN;
    }
    Py_XDECREF(name);
    fits = fits && at == size && !PyErr_Occurred();
    for (; !fits && found > 0; found--)
        Py_DECREF(gradients[found - 1].grad);
    PyErr_Clear();
    return fits ? found : -1;
}

static PyObject *python_take_norms(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 5 || !PyList_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take_norms() takes a list, bytes, a type, a capsule, int");
        return NULL;
    }
    const Exchange *exchange = exchange_of(args[3]);
    double *row = PyLong_AsVoidPtr(args[4]);
    Py_ssize_t size = PyBytes_Size(args[1]) / (Py_ssize_t)(2 * sizeof(int64_t));
    Gradient *gradients = malloc(((size_t)size + 1) * sizeof *gradients);
    if (PyErr_Occurred() || gradients == NULL) {
        free(gradients);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_ssize_t group_count = PyList_Size(args[0]), found = -1;
    if (exchange != NULL)
        found = find_gradients(args[0], (const int64_t *)(const void *)PyBytes_AsString(args[1]),
                               size, args[2], exchange, row, gradients);
    double *norms = row + group_count, total = 0;
    int64_t elements = 0;
    for (Py_ssize_t i = 0; i < found; i++)
        elements += gradients[i].tensor.count;
    PyThreadState *state = elements > GIL_KEPT ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < found; i++) {
        double square = kernels->squared_norm(&gradients[i].tensor);
        norms[gradients[i].place] = sqrt(square);
        total += square;
    }
    if (state != NULL)
        PyEval_RestoreThread(state);
    for (Py_ssize_t i = 0; i < found; i++)
        Py_DECREF(gradients[i].grad);
    free(gradients);
    return PyFloat_FromDouble(found < 0 ? -1.0 : total);
}

/* --- the module ------------------------------------------------------------------------------- */

static PyObject *python_instructions(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    const Kernels *found[3];
    int size = find_kernels(found);
    PyObject *names = PyList_New(size);
    for (int i = 0; names != NULL && i < size; i++)
        PyList_SetItem(names, i, PyUnicode_FromString(found[i]->instructions));
    return names;
}

static PyObject *python_use_instructions(PyObject *module, PyObject *name)
{
    (void)module;
    const Kernels *found[3];
    for (int i = find_kernels(found) - 1; PyUnicode_Check(name) && i >= 0; i--)
        if (PyUnicode_CompareWithASCIIString(name, found[i]->instructions) == 0) {
            kernels = found[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no instructions %R", name);
}

#define METHOD(FUNCTION) ((PyCFunction)(void (*)(void))(FUNCTION))

static PyMethodDef methods[] = {
    {"measure", METHOD(python_measure), METH_FASTCALL, NULL},
    {"measure_tensors", METHOD(python_measure_tensors), METH_FASTCALL, NULL},
    {"squared_norms", METHOD(python_squared_norms), METH_FASTCALL, NULL},
    {"take_norms", METHOD(python_take_norms), METH_FASTCALL, NULL},
    {"instructions", python_instructions, METH_NOARGS, NULL},
    {"use_instructions", python_use_instructions, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "telemetry.measure._native", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    const Kernels *found[3];
    kernels = found[find_kernels(found) - 1];
    return PyModuleDef_Init(&definition);
}

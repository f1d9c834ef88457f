/* Temporary: what the kernels do, for the host. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { double sums[4]; uint32_t low, high; uint32_t zero, nan, pinf, ninf; int64_t count; int64_t units; int64_t padding; uint32_t hist[4096]; uint32_t more[4]; } Row;
typedef struct { int64_t count, nan, pinf, ninf, zero; double min, max, sums[4]; int64_t sampled, buckets, units; } Head;
typedef struct { uint32_t count; int16_t bucket, unused; } Pair;
typedef struct { uint32_t low, high; } Unit;
_Static_assert(sizeof(Row) == 16480, "size");

static uint32_t ordered(float f) { uint32_t b; memcpy(&b, &f, 4); return b >> 31 ? ~b : b | 0x80000000u; }
static float unordered(uint32_t o) { uint32_t b = o >> 31 ? o ^ 0x80000000u : ~o; float f; memcpy(&f, &b, 4); return f; }
static float value(const void *x, int64_t i, int kind)
{
    uint32_t bits; float f;
    if (kind == 0) return ((const float *)x)[i];
    if (kind == 2) return (float)((const _Float16 *)x)[i];
    bits = (uint32_t)((const uint16_t *)x)[i] << 16; memcpy(&f, &bits, 4); return f;
}
static void measure(const void *x, int64_t count, int64_t units, int64_t inner, int powers, Row *row, Unit *unit, int kind)
{
    row->count = count; row->units = units;
    for (int64_t i = 0; i < count; i++) {
        float f = value(x, i, kind); uint32_t b; memcpy(&b, &f, 4);
        if (units) {
            Unit *u = unit + i / inner % units;
            uint32_t lo = isnan(f) ? ~0u : ~ordered(f), hi = isnan(f) ? ~0u : ordered(f);
            if (lo > u->low) u->low = lo;
            if (hi > u->high) u->high = hi;
        }
        if (isnan(f)) { row->nan++; continue; }
        if (isinf(f)) { if (f > 0) row->pinf++; else row->ninf++; continue; }
        row->zero += f == 0;
        double p = f;
        for (int k = 0; k < powers; k++, p *= f) row->sums[k] += p;
        if (~ordered(f) > row->low) row->low = ~ordered(f);
        if (ordered(f) > row->high) row->high = ordered(f);
        row->hist[f == 0 ? 0 : (b + 0x8000u) >> 20]++;
    }
}
typedef struct { uint64_t a[16]; } Arguments;
#define KERNEL(NAME, KIND) void NAME(const uint64_t *a) { measure((void *)a[0], a[1], a[2], a[3], (int)a[4], (Row *)a[5], (Unit *)a[6], KIND); }
KERNEL(measure_f32, 0)
KERNEL(measure_bf16, 1)
KERNEL(measure_f16, 2)

void pack(const uint64_t *a)
{
    Row *rows = (Row *)a[0]; int64_t n = a[1], units = a[3]; Unit *unit = (Unit *)a[2];
    Head *heads = (Head *)a[4]; float (*out)[2] = (void *)(heads + n); uint64_t *total = (uint64_t *)(out + units); Pair *pairs = (Pair *)(total + 1);
    *total = 0;
    for (int64_t i = 0; i < units; i++) { out[i][0] = unit[i].low == ~0u ? NAN : unordered(~unit[i].low); out[i][1] = unit[i].high == ~0u ? NAN : unordered(unit[i].high); }
    for (int64_t r = 0; r < n; r++) {
        Row *row = rows + r; Head *h = heads + r;
        *h = (Head){row->count, row->nan, row->pinf, row->ninf, row->zero, NAN, NAN, {row->sums[0], row->sums[1], row->sums[2], row->sums[3]}, -1, 0, row->units};
        if (row->high) { h->min = unordered(~row->low); h->max = unordered(row->high); }
        row->hist[2039] += row->hist[2040]; row->hist[2048 + 2039] += row->hist[2048 + 2040];
        row->hist[0] += row->hist[2048];
        for (int c = 2039; c >= 1; c--) if (row->hist[2048 + c]) { pairs[(*total)++] = (Pair){row->hist[2048 + c], -c, 0}; h->buckets++; }
        for (int c = 0; c <= 2039; c++) if (row->hist[c]) { pairs[(*total)++] = (Pair){row->hist[c], c, 0}; h->buckets++; }
    }
}
void emulate(void (*kernel)(const uint64_t *), const uint64_t *arguments) { kernel(arguments); }

// Runs CUDA kernels on the host: one operating-system thread, the threads of a block as coroutines.
//
// A coroutine gives way wherever threads wait for each other, and who goes on is drawn by chance, as
// is the order of blocks; what depends on an order that nothing ensures shows. What is wrong ends the
// launch with a message: an unaligned access, a read of a tensor beyond its ends, threads that wait
// in different places. Shared memory is not cleared between blocks.
#pragma once
#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>
#include <ucontext.h>

#define EMULATED
#define __global__
#define __device__
#define __forceinline__
#define __shared__ static
#define __launch_bounds__(...)

struct uint4 { uint32_t x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static struct { unsigned x; } threadIdx, blockIdx, gridDim;

// --- threads ------------------------------------------------------------------------------------

namespace emulated {

constexpr int SIZE = THREADS, STACK = 256 << 10;

struct Meeting { unsigned arrived = 0, round = 0; };

static std::unique_ptr<char[]> stacks(new char[(size_t)SIZE * STACK]);
static ucontext_t contexts[SIZE];
static jmp_buf main_place, places[SIZE];
static bool started[SIZE], ended[SIZE], moved;
static char failure[200];
static Meeting block, warps[SIZE / 32];
static uint64_t exchanged[SIZE];
static void (*body)(void *);
static void *body_data;
static std::minstd_rand chance;
struct Span { const char *from, *to; };
static std::vector<Span> readable;

/* Ends the launch; what a thread has allocated is lost. */
static void fail(const char *what)
{
    snprintf(failure, sizeof failure, "%s (block %u, thread %u)", what, blockIdx.x, threadIdx.x);
    _longjmp(main_place, 1);
}

static void give_way()
{
    unsigned me = threadIdx.x;
    if (!_setjmp(places[me]))
        _longjmp(main_place, 1);
    threadIdx.x = me;
}

static void meet(Meeting &meeting, unsigned size)
{
    unsigned round = meeting.round;
    moved = true;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        meeting.round++;
        return give_way();
    }
    while (meeting.round == round)
        give_way();
    moved = true;
}

static void run_thread()
{
    body(body_data);
    ended[threadIdx.x] = moved = true;
    _longjmp(main_place, 1);
}

static void run_block()
{
    std::vector<unsigned> order(SIZE);
    std::iota(order.begin(), order.end(), 0u);
    for (int i = 0; i < SIZE; i++) started[i] = ended[i] = false;
    for (size_t left = SIZE; left; ) {
        moved = false;
        std::shuffle(order.begin(), order.end(), chance);
        for (volatile size_t i = 0; i < SIZE; i = i + 1) {
            unsigned thread = order[i];
            if (ended[thread]) continue;
            threadIdx.x = thread;
            if (!_setjmp(main_place)) {
                if (started[thread]) _longjmp(places[thread], 1);
                started[thread] = moved = true;
                getcontext(&contexts[thread]);
                contexts[thread].uc_stack.ss_sp = stacks.get() + (size_t)thread * STACK;
                contexts[thread].uc_stack.ss_size = STACK;
                makecontext(&contexts[thread], run_thread, 0);
                setcontext(&contexts[thread]);
            }
            if (*failure) return;
        }
        left = 0;
        for (int i = 0; i < SIZE; i++) left += !ended[i];
        if (left && !moved) {
            strcpy(failure, "threads wait for others that have ended or wait elsewhere");
            return;
        }
    }
}

template <class T> T *aligned(T *at)
{
    if ((uintptr_t)at % sizeof(T)) fail("unaligned access");
    return at;
}

template <class T> T shuffled(T value, unsigned from)
{
    unsigned me = threadIdx.x;
    static_assert(sizeof(T) <= 8, "");
    memcpy(&exchanged[me], &value, sizeof value);
    meet(warps[me / 32], 32);
    if (from < 32) memcpy(&value, &exchanged[me / 32 * 32 + from], sizeof value);
    meet(warps[me / 32], 32);
    return value;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>)
{
    kernel(*(A *)arguments[I]...);
}

template <class... A>
const char *launch(void (*kernel)(A...), unsigned grid, unsigned seed, void **arguments)
{
    auto thread = [&] { call(kernel, arguments, std::index_sequence_for<A...>()); };
    body = [](void *data) { (*(decltype(thread) *)data)(); };
    body_data = &thread;
    chance.seed(seed);
    gridDim.x = grid;
    std::vector<unsigned> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), chance);
    *failure = 0;
    block = {};
    for (Meeting &warp : warps) warp = {};
    for (size_t i = 0; i < grid && !*failure; i++) {
        blockIdx.x = blocks[i];
        run_block();
    }
    return failure;
}

} // namespace emulated

// From here on tensors may be read there; none are known at first.
extern "C" void forget_tensors() { emulated::readable.clear(); }
extern "C" void allow_tensor(const char *at, size_t size)
{
    emulated::readable.push_back({at, at + size});
}

// As cuLaunchKernel: a pointer to each argument. Returns what went wrong, or nothing.
#define EMULATE(KERNEL)                                                                            \
    extern "C" const char *emulate_##KERNEL(unsigned grid, unsigned seed, void **arguments)        \
    {                                                                                              \
        return emulated::launch(KERNEL, grid, seed, arguments);                                    \
    }

// --- what kernels call --------------------------------------------------------------------------

static void __syncthreads() { emulated::meet(emulated::block, THREADS); }
static void __threadfence()
{
    emulated::moved = true;
    emulated::give_way();
}

template <class T> T __shfl_down_sync(unsigned, T value, unsigned by)
{
    return emulated::shuffled(value, threadIdx.x % 32 + by);
}
template <class T> T __shfl_xor_sync(unsigned, T value, unsigned by)
{
    return emulated::shuffled(value, threadIdx.x % 32 ^ by);
}

template <class T> T __ldg(const T *at)
{
    const char *from = (const char *)at;
    if ((uintptr_t)at % sizeof(T)) emulated::fail("unaligned load");
    for (const emulated::Span &span : emulated::readable)
        if (span.from <= from && from + sizeof(T) <= span.to) {
            T value;
            memcpy(&value, at, sizeof value);
            return value;
        }
    emulated::fail("load from beyond the ends of the tensor");
    abort();
}

template <class T> T atomicAdd(T *at, T value)
{
    T before = *emulated::aligned(at);
    *at += value;
    return before;
}
template <class T> T atomicMax(T *at, T value)
{
    T before = *emulated::aligned(at);
    if (value > before) *at = value;
    return before;
}

template <class To, class From> static To same_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static float __uint_as_float(uint32_t bits) { return same_bits<float>(bits); }
static uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static long long __double_as_longlong(double value) { return same_bits<long long>(value); }
static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (bits & 31));
}
template <class T> static T max(T a, T b) { return a > b ? a : b; }
template <class T> static T min(T a, T b) { return a < b ? a : b; }

static float half_value(uint32_t bits)
{
    uint32_t magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    float value = __uint_as_float(magnitude << 13) * 0x1p112f;
    uint32_t special = magnitude << 13 | 0x7f800000;
    return __uint_as_float(sign | (magnitude >= 0x7c00 ? special : __float_as_uint(value)));
}

// The lesser and the greater number of pairs of float16 or bfloat16.
#if __CUDA_ARCH__ >= 800 && DTYPE != 1
static float half_of(uint32_t bits)
{
    return DTYPE == 2 ? half_value(bits & 0xffff) : __uint_as_float(bits << 16);
}
template <class Choose> static uint32_t by_halves(uint32_t a, uint32_t b, Choose first_of)
{
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16)
        result |= ((first_of(half_of(a >> shift), half_of(b >> shift)) ? a : b) >> shift & 0xffff) << shift;
    return result;
}
static uint32_t lesser(uint32_t a, uint32_t b)
{
    return by_halves(a, b, [](float x, float y) { return x < y; });
}
static uint32_t greater(uint32_t a, uint32_t b)
{
    return by_halves(a, b, [](float x, float y) { return x > y; });
}
#endif

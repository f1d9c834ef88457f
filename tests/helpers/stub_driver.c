/* A CUDA driver for tests: device memory is the host's, kernels are compiled for the host (see
 * emulated.h), and an image is the path of the library that they are in.
 *
 * What is queued is done at once; or, if ``stub_deferred`` is set, when the host waits for an event.
 * Then nothing is done but what is ordered before it, so that a missing wait shows in the figures.
 * ``stub_idle``: nothing is done at all. Each call is written down.
 */

#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGUMENTS = 16, CALLS = 1 << 16, STREAMS = 64, INVALID = 1, NOT_READY = 600 };

typedef struct Task Task;

typedef struct {
    const char *(*emulate)(unsigned grid, unsigned seed, void **arguments); /* what is wrong */
    char name[64];
} Kernel;

struct Task {
    Task *before, *after; /* both come first: in the same stream, and what it waits for */
    int done;
    const Kernel *kernel;
    uint64_t arguments[ARGUMENTS];
    unsigned grid;
    void *target;
    const void *source;
    size_t size;
    int byte;
};

typedef struct {
    Task *task;
} Event;

typedef struct {
    char name[32], kernel[64];
    uint64_t stream, target, size, arguments[ARGUMENTS];
} Call;

Call stub_calls[CALLS];
int stub_call_count, stub_deferred, stub_idle, stub_capturing, stub_error;
char stub_failing[32]; /* the function that returns stub_error */

static struct {
    void *handle;
    Task *last;
} streams[STREAMS];
static int primary;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *current;
static __thread int capture_mode; /* of calls that this thread makes while another captures */

static Call *note(const char *name, void *stream, uint64_t target, uint64_t size)
{
    Call *call = &stub_calls[__atomic_fetch_add(&stub_call_count, 1, __ATOMIC_RELAXED) % CALLS];
    memset(call, 0, sizeof *call);
    snprintf(call->name, sizeof call->name, "%s", name);
    call->stream = (uint64_t)(uintptr_t)stream;
    call->target = target;
    call->size = size;
    return call;
}

#define CHECKED(STREAM, TARGET, SIZE)                    \
    Call *call = note(__func__, STREAM, (uint64_t)(TARGET), SIZE); \
    (void)call;                                          \
    if (current != &primary)                             \
        return 201; /* invalid context */                \
    if (capture_mode == 0)                               \
        return 901; /* would invalidate a capture */     \
    if (strcmp(__func__, stub_failing) == 0)             \
        return stub_error

static Task **last_of(void *stream)
{
    int i = 0;
    while (i < STREAMS - 1 && streams[i].handle != stream && streams[i].last != NULL)
        i++;
    streams[i].handle = stream;
    return &streams[i].last;
}

static void run(Task *task)
{
    if (task == NULL || task->done)
        return;
    run(task->after); /* first, so that it is not ordered by chance */
    run(task->before);
    task->done = 1;
    void *arguments[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i] = &task->arguments[i];
    if (stub_idle)
        return;
    const char *wrong = task->kernel ? task->kernel->emulate(task->grid, 0, arguments) : NULL;
    if (wrong && *wrong) {
        fprintf(stderr, "%s: %s\n", task->kernel->name, wrong);
        abort();
    }
    if (task->kernel)
        return;
    if (task->source)
        memcpy(task->target, task->source, task->size);
    else if (task->target)
        memset(task->target, task->byte, task->size);
}

static int queue(Task task, void *stream)
{
    pthread_mutex_lock(&lock);
    Task **last = last_of(stream), *queued = malloc(sizeof task);
    *queued = task;
    queued->before = *last;
    *last = queued;
    if (!stub_deferred)
        run(queued);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Drop what is queued: its memory may be gone. */
void stub_begin(void)
{
    memset(streams, 0, sizeof streams);
}

/* --- the driver's functions ------------------------------------------------------------------- */

int cuGetErrorString(int code, const char **text)
{
    static char message[32];
    snprintf(message, sizeof message, "stub %d", code);
    *text = message;
    return 0;
}

int cuInit(unsigned flags)
{
    note("cuInit", NULL, 0, flags);
    return strcmp("cuInit", stub_failing) ? 0 : stub_error;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal ? 101 : 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = 2;
    return device || attribute != 16;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = &primary;
    return device;
}

int cuCtxGetCurrent(void **context)
{
    *context = current;
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    if (current != NULL)
        return INVALID; /* one level is enough here */
    current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = current;
    current = NULL;
    return 0;
}

int cuModuleLoadData(void **module, const void *image)
{
    CHECKED(NULL, 0, 0);
    *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    void *found = *module ? dlsym(*module, "allow_tensor") : NULL;
    void (*allow_tensor)(const char *at, size_t size);
    memcpy(&allow_tensor, &found, sizeof found);
    if (found)
        allow_tensor(NULL, SIZE_MAX);
    return found ? 0 : 200; /* invalid image */
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    CHECKED(NULL, 0, 0);
    Kernel *kernel = malloc(sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    char symbol[80];
    snprintf(symbol, sizeof symbol, "emulate_%s", name);
    void *found = dlsym(module, symbol);
    memcpy(&kernel->emulate, &found, sizeof found);
    *function = kernel;
    return found ? 0 : 500; /* not found */
}

int cuFuncGetAttribute(int *value, int attribute, void *function)
{
    *value = 1024;
    return attribute != 0 || function == NULL;
}

int cuLaunchKernel(const Kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void *stream, void **arguments, void **extra)
{
    CHECKED(stream, 0, grid_x);
    snprintf(call->kernel, sizeof call->kernel, "%s", kernel->name);
    if (!grid_x || grid_x > 65535 || grid_y != 1 || grid_z != 1 || block_x != 512 || block_y != 1 ||
        block_z != 1 || shared_bytes || extra)
        return INVALID;
    Task task = {.kernel = kernel, .grid = grid_x};
    for (int i = 0; i < ARGUMENTS && arguments[i]; i++) /* ended by NULL, unlike the driver's */
        memcpy(&task.arguments[i], arguments[i], sizeof(uint64_t));
    memcpy(call->arguments, task.arguments, sizeof task.arguments);
    return queue(task, stream);
}

int cuMemsetD8Async(uint64_t target, unsigned char byte, size_t size, void *stream)
{
    CHECKED(stream, target, size);
    return queue((Task){.target = (void *)(uintptr_t)target, .byte = byte, .size = size}, stream);
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream)
{
    CHECKED(stream, (uintptr_t)target, size);
    Task task = {.target = target, .source = (void *)(uintptr_t)source, .size = size};
    return queue(task, stream);
}

int cuStreamCreate(void **stream, unsigned flags)
{
    CHECKED(NULL, 0, flags);
    *stream = malloc(8);
    return flags != 1;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = stub_capturing && stream != NULL;
    return stub_capturing && stream == NULL ? 906 : 0; /* would be implicit */
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

int cuStreamWaitEvent(void *stream, const Event *event, unsigned flags)
{
    CHECKED(stream, (uintptr_t)event, flags);
    return queue((Task){.after = event->task}, stream);
}

int cuEventCreate(Event **event, unsigned flags)
{
    CHECKED(NULL, 0, flags);
    *event = calloc(1, sizeof **event);
    return 0;
}

int cuEventRecord(Event *event, void *stream)
{
    CHECKED(stream, (uintptr_t)event, 0);
    queue((Task){0}, stream);
    event->task = *last_of(stream);
    return 0;
}

int cuEventDestroy_v2(Event *event)
{
    CHECKED(NULL, (uintptr_t)event, 0);
    free(event);
    return 0;
}

int cuEventQuery(const Event *event)
{
    CHECKED(NULL, (uintptr_t)event, 0);
    return event->task == NULL || event->task->done ? 0 : NOT_READY;
}

int cuEventSynchronize(const Event *event)
{
    CHECKED(NULL, (uintptr_t)event, 0);
    pthread_mutex_lock(&lock);
    run(event->task);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* --- tensors ---------------------------------------------------------------------------------- */

#include "../../telemetry/measure/dlpack.h"

static const Exchange *real;

/* Tensors in CPU memory, or the ``inner`` ones of others, are on the GPU. */
static int describe_as_on_gpu(void *tensor, DLTensor *description)
{
    PyObject *inner = PyObject_GetAttrString(tensor, "inner");
    int failed = real->describe(PyCallable_Check(inner) ? tensor : inner, description); /* Tensor.inner() */
    description->device.type = ON_CUDA;
    description->device.id = 0;
    Py_DECREF(inner);
    return failed;
}

PyObject *stub_exchange(PyObject *capsule)
{
    static Exchange exchange;
    real = exchange_of(capsule);
    exchange = *real;
    exchange.describe = describe_as_on_gpu;
    return PyCapsule_New(&exchange, "dlpack_exchange_api", NULL);
}

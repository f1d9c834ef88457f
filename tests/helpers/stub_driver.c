/* A CUDA driver for tests: device memory is the host's, kernels are compiled for the host (see
 * emulated.h) and run at once, and an image is the path of the library that they are in. Each call is
 * written down. ``stub_idle``: no kernel runs.
 */

#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGUMENTS = 16, CALLS = 1 << 16, INVALID = 1 };

typedef struct {
    const char *(*emulate)(unsigned grid, unsigned seed, void **arguments); /* what is wrong */
    char name[64];
} Kernel;

typedef struct {
    char name[32], kernel[64];
    uint64_t stream, size, arguments[ARGUMENTS];
} Call;

Call stub_calls[CALLS];
int stub_call_count, stub_idle, stub_capturing, stub_error;
char stub_failing[32]; /* the function that returns stub_error */

static int primary;
static __thread void *current;
static __thread int capture_mode; /* of calls that this thread makes while another captures */

static Call *note(const char *name, void *stream, uint64_t size)
{
    Call *call = &stub_calls[__atomic_fetch_add(&stub_call_count, 1, __ATOMIC_RELAXED) % CALLS];
    memset(call, 0, sizeof *call);
    snprintf(call->name, sizeof call->name, "%s", name);
    call->stream = (uint64_t)(uintptr_t)stream;
    call->size = size;
    return call;
}

#define CHECKED(STREAM, SIZE)                        \
    Call *call = note(__func__, STREAM, SIZE);       \
    (void)call;                                      \
    if (current != &primary)                         \
        return 201; /* invalid context */            \
    if (capture_mode == 0)                           \
        return 901; /* would invalidate a capture */ \
    if (strcmp(__func__, stub_failing) == 0)         \
        return stub_error

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
    note("cuInit", NULL, flags);
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
    CHECKED(NULL, 0);
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
    CHECKED(NULL, 0);
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
    CHECKED(stream, grid_x);
    snprintf(call->kernel, sizeof call->kernel, "%s", kernel->name);
    if (!grid_x || grid_x > 65535 || grid_y != 1 || grid_z != 1 || block_x != 512 || block_y != 1 ||
        block_z != 1 || shared_bytes || extra)
        return INVALID;
    for (int i = 0; i < ARGUMENTS && arguments[i]; i++) /* ended by NULL, unlike the driver's */
        memcpy(&call->arguments[i], arguments[i], sizeof(uint64_t));
    const char *wrong = stub_idle ? "" : kernel->emulate(grid_x, 0, arguments);
    if (*wrong) {
        fprintf(stderr, "%s: %s\n", kernel->name, wrong);
        abort();
    }
    return 0;
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

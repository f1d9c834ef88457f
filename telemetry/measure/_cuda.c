/* Launches the kernels of kernels.cu on tensors in a GPU's memory.
 *
 * A step's tensors are measured into a buffer: dense rows, which each tensor's own stream writes,
 * and which a stream of ours packs and copies to the host once all of them are through. Whatever a
 * kernel is given is looked at first, because an invalid address ends the training.
 *
 * The driver is loaded when it is asked for, so that this is built and loaded without CUDA. The
 * module uses Python's limited API only. What it has is described in _cuda.pyi.
 */

#ifdef Py_GIL_DISABLED
#undef Py_LIMITED_API
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "dlpack.h"

#if defined(_WIN32)
#include <windows.h>
#define DRIVER "nvcuda.dll"
#define open_library(NAME) ((void *)LoadLibraryA(NAME))
#define find_symbol(LIBRARY, NAME) ((void *)(uintptr_t)GetProcAddress((HMODULE)(LIBRARY), NAME))
#define CALL __stdcall
#else
#include <dlfcn.h>
#define DRIVER "libcuda.so.1"
#define open_library(NAME) dlopen(NAME, RTLD_NOW | RTLD_LOCAL)
#define find_symbol(LIBRARY, NAME) dlsym(LIBRARY, NAME)
#define CALL
#endif

/* --- the driver ------------------------------------------------------------------------------- */

typedef struct ContextOfDriver *Context;
typedef struct ModuleOfDriver *Module;
typedef struct FunctionOfDriver *Function;
typedef struct StreamOfDriver *Stream;
typedef struct EventOfDriver *Event;
typedef unsigned long long Address;

/* Name here, the name that stands for this signature in every driver, and arguments. */
#define DRIVER_FUNCTIONS(X)                                                                       \
    X(get_error_string, cuGetErrorString, (int code, const char **text))                          \
    X(initialize, cuInit, (unsigned flags))                                                       \
    X(get_device, cuDeviceGet, (int *device, int ordinal))                                        \
    X(get_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))               \
    X(retain_context, cuDevicePrimaryCtxRetain, (Context *context, int device))                   \
    X(get_current, cuCtxGetCurrent, (Context *context))                                           \
    X(push_context, cuCtxPushCurrent_v2, (Context context))                                       \
    X(pop_context, cuCtxPopCurrent_v2, (Context *context))                                        \
    X(load_module, cuModuleLoadData, (Module *module, const void *image))                         \
    X(get_function, cuModuleGetFunction, (Function *function, Module module, const char *name))   \
    X(get_function_attribute, cuFuncGetAttribute, (int *value, int attribute, Function function)) \
    X(launch, cuLaunchKernel,                                                                     \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,    \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream,                  \
       void **arguments, void **extra))                                                           \
    X(fill, cuMemsetD8Async, (Address target, unsigned char byte, size_t size, Stream stream))    \
    X(copy_to_host, cuMemcpyDtoHAsync_v2,                                                         \
      (void *target, Address source, size_t size, Stream stream))                                 \
    X(create_stream, cuStreamCreate, (Stream *stream, unsigned flags))                            \
    X(is_capturing, cuStreamIsCapturing, (Stream stream, int *status))                            \
    X(wait_for_event, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))            \
    X(create_event, cuEventCreate, (Event *event, unsigned flags))                                \
    X(record_event, cuEventRecord, (Event event, Stream stream))                                  \
    X(destroy_event, cuEventDestroy_v2, (Event event))                                            \
    X(query_event, cuEventQuery, (Event event))                                                   \
    X(synchronize_event, cuEventSynchronize, (Event event))

#define DECLARE(NAME, SYMBOL, ARGUMENTS) int(CALL *NAME) ARGUMENTS;
static struct {
    DRIVER_FUNCTIONS(DECLARE)
} driver;

/* Raise what a call of the driver has returned. */
static PyObject *raise_error(const char *doing, int code)
{
    const char *text = NULL;
    if (driver.get_error_string(code, &text) || text == NULL)
        text = "unknown";
    return PyErr_Format(PyExc_RuntimeError, "CUDA, to %s: error %d, %s", doing, code, text);
}

static PyObject *tensor_types; /* classes that tensors may be of */
static const Exchange *exchange;

static PyObject *python_load(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 3 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "load() takes a path, a tuple of types and a capsule");
        return NULL;
    }
    exchange = exchange_of(args[2]);
    if (exchange == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_OSError, "PyTorch describes tensors by another version of DLPack");
    if (exchange == NULL)
        return NULL;
    Py_XDECREF(tensor_types);
    tensor_types = Py_NewRef(args[1]);
    PyObject *bytes = args[0] == Py_None ? PyBytes_FromString(DRIVER)
                                         : PyUnicode_EncodeFSDefault(args[0]);
    if (bytes == NULL)
        return NULL;
    void *library = open_library(PyBytes_AsString(bytes));
    const char *missing = NULL;
#define FIND(NAME, SYMBOL, ARGUMENTS)                             \
    if (library != NULL) {                                        \
        void *found = find_symbol(library, #SYMBOL);              \
        memcpy(&driver.NAME, &found, sizeof found);               \
        missing = found ? missing : #SYMBOL;                      \
    }
    DRIVER_FUNCTIONS(FIND)
    if (library == NULL)
        PyErr_Format(PyExc_OSError, "%s cannot be loaded", PyBytes_AsString(bytes));
    else if (missing != NULL)
        PyErr_Format(PyExc_OSError, "%s has no %s", PyBytes_AsString(bytes), missing);
    Py_DECREF(bytes);
    if (PyErr_Occurred())
        return NULL;
    int code = driver.initialize(0);
    return code ? raise_error("initialize", code) : Py_NewRef(Py_None);
}

/* --- a device --------------------------------------------------------------------------------- */

/* The kernels, as kernels.cu describes them. */
enum { MEASURE_FLOAT, MEASURE_BFLOAT, MEASURE_HALF, PACK, FUNCTIONS };
static const char *const KERNELS[] = {"measure_f32", "measure_bf16", "measure_f16", "pack"};
enum {
    THREADS = 512,
    PER_PROCESSOR = 4,
    ROW = 16480,       /* bytes on the device */
    UNIT = 8,
    HEAD = 112,        /* bytes on the host, see records/rows.py */
    PAIR = 8,
    PAIRS = 512,       /* that there is room for, and units, for each row on average */
    UNITS = 512,
    MOST = 0x7FFFFFF0  /* elements of a row */
};

enum {
    NON_BLOCKING = 1,          /* a stream that does not wait for the default stream */
    WAIT_WITHOUT_SPINNING = 1, /* flags of events */
    NO_TIMES = 2,
    NOT_READY = 600,
    PROCESSORS = 16,           /* attributes of a device and of a function */
    THREADS_AT_MOST = 0,
    STREAMS = 16               /* on which tensors of one step are measured, at most */
};

typedef struct {
    Context context;
    Stream side; /* on which rows are packed, copied and cleared */
    int ordinal, processors;
    Function functions[FUNCTIONS];
} Device;

/* Make the device's context current; tells whether it was put on top of another. */
static int enter(const Device *device, int *pushed)
{
    Context current = NULL;
    int code = driver.get_current(&current);
    *pushed = !code && current != device->context;
    return *pushed ? driver.push_context(device->context) : code;
}

static void leave(int pushed)
{
    Context popped;
    if (pushed)
        driver.pop_context(&popped);
}

static Device *device_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "telemetry.device");
}

static void free_device(PyObject *capsule)
{
    free(device_of(capsule)); /* what the driver has of it lasts as long as the process */
}

static const char *open_device(Device *device, const void *image, int *code)
{
    int number, pushed, threads;
    if ((*code = driver.get_device(&number, device->ordinal)))
        return "find the device";
    if ((*code = driver.retain_context(&device->context, number)))
        return "get its context";
    if ((*code = driver.get_attribute(&device->processors, PROCESSORS, number)))
        return "count its processors";
    if ((*code = enter(device, &pushed)))
        return "enter its context";
    const char *failed = NULL;
    Module module;
    if ((*code = driver.load_module(&module, image)))
        failed = "load the kernels";
    for (int i = 0; !failed && i < FUNCTIONS; i++)
        if ((*code = driver.get_function(&device->functions[i], module, KERNELS[i])) ||
            (*code = driver.get_function_attribute(&threads, THREADS_AT_MOST, device->functions[i])))
            failed = KERNELS[i];
        else if (threads < THREADS)
            failed = "have enough threads";
    if (!failed && (*code = driver.create_stream(&device->side, NON_BLOCKING)))
        failed = "create a stream";
    leave(pushed);
    return failed;
}

static PyObject *python_open(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "open() takes an int and bytes");
        return NULL;
    }
    long ordinal = PyLong_AsLong(args[0]);
    Device *device = PyErr_Occurred() ? NULL : calloc(1, sizeof *device);
    if (device == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    device->ordinal = (int)ordinal;
    int code;
    PyThreadState *state = PyEval_SaveThread();
    const char *failed = open_device(device, PyBytes_AsString(args[1]), &code);
    PyEval_RestoreThread(state);
    if (failed) {
        free(device);
        return raise_error(failed, code);
    }
    return PyCapsule_New(device, "telemetry.device", free_device);
}

/* --- a buffer --------------------------------------------------------------------------------- */

/* What tensors of one step are measured into; one thread at a time uses it. Once it is sent it can be
 * used again at once: streams wait for each other, and never the host. */
typedef struct {
    const Device *device;
    Address rows, units, packed; /* of the device's memory */
    int64_t row_capacity, unit_capacity, row_count, unit_count;
    Stream streams[STREAMS]; /* on which tensors were measured since it was sent */
    int stream_count;
    Event used[STREAMS], cleared;
} Buffer;

static Buffer *buffer_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "telemetry.buffer");
}

/* Have what was used be zeros again, once our own stream is there. */
static int clear(Buffer *buffer)
{
    Stream side = buffer->device->side;
    int code = 0;
    if (buffer->row_count)
        code = driver.fill(buffer->rows, 0, (size_t)buffer->row_count * ROW, side);
    if (!code && buffer->unit_count)
        code = driver.fill(buffer->units, 0, (size_t)buffer->unit_count * UNIT, side);
    buffer->row_count = buffer->unit_count = buffer->stream_count = 0;
    return code ? code : driver.record_event(buffer->cleared, side);
}

/* Let our own stream come after all that was measured. */
static int join_streams(Buffer *buffer)
{
    int code = 0;
    for (int i = 0; !code && i < buffer->stream_count; i++)
        if (!(code = driver.record_event(buffer->used[i], buffer->streams[i])))
            code = driver.wait_for_event(buffer->device->side, buffer->used[i], 0);
    return code;
}

/* Let a stream come after the clearing of the buffer, and remember it. */
static int note_stream(Buffer *buffer, Stream stream)
{
    for (int i = 0; i < buffer->stream_count; i++)
        if (buffer->streams[i] == stream)
            return 0;
    int code = driver.wait_for_event(stream, buffer->cleared, 0);
    if (!code)
        buffer->streams[buffer->stream_count++] = stream;
    return code;
}

static PyObject *python_buffer(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    const Device *device = arg_count == 4 ? device_of(args[0]) : NULL;
    Buffer *buffer = device ? calloc(1, sizeof *buffer) : NULL;
    if (buffer == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "buffer() takes a device and 3 numbers");
        return NULL;
    }
    uintptr_t memory = (uintptr_t)PyLong_AsVoidPtr(args[1]), first = (memory + 255) / 256 * 256;
    int64_t size = PyLong_AsLongLong(args[2]) - (int64_t)(first - memory) - 256;
    Stream stream = PyLong_AsVoidPtr(args[3]);
    buffer->device = device;
    int64_t rows = size / (ROW + UNITS * 2 * UNIT + HEAD + PAIRS * PAIR);
    buffer->row_count = buffer->row_capacity = rows;
    buffer->unit_count = buffer->unit_capacity = rows * UNITS;
    buffer->rows = (Address)first;
    buffer->units = buffer->rows + (Address)(rows * ROW);
    buffer->packed = buffer->units + (Address)(rows * UNITS * UNIT);
    int pushed = 0, code = PyErr_Occurred() ? 0 : enter(device, &pushed);
    for (int i = 0; !code && i <= STREAMS; i++)
        code = driver.create_event(i < STREAMS ? &buffer->used[i] : &buffer->cleared, NO_TIMES);
    buffer->streams[0] = stream; /* on which the memory was lent to us */
    buffer->stream_count = 1;
    if (!code && !(code = join_streams(buffer)))
        code = clear(buffer);
    leave(pushed);
    if (code || PyErr_Occurred()) {
        free(buffer);
        return PyErr_Occurred() ? NULL : raise_error("prepare a buffer", code);
    }
    return PyCapsule_New(buffer, "telemetry.buffer", NULL); /* as long as the process lasts */
}

/* --- measuring -------------------------------------------------------------------------------- */

enum { REFUSED = 0, FULL = -1 };

/* What a kernel would read of a tensor; 0 if none takes it. */
static int ask(PyObject *object, PyObject *axis, const Device *device, Values *values)
{
    if (!is_of_type(object, tensor_types) || !describe(object, exchange, axis, values))
        return 0;
    uintptr_t size = values->dtype == 'f' ? 4 : 2;
    return values->count && values->dtype != 'd' && values->device_type == ON_CUDA &&
           values->device == device->ordinal && (uintptr_t)values->values % size == 0;
}

/* How many of its elements a row may be of: all, or as many whole rows of units as are below 2^31. */
static int64_t longest(const Values *values)
{
    int64_t together = values->units ? values->units * values->inner : 16;
    return values->count <= MOST ? values->count : MOST / together * together;
}

static int kernel_of(int dtype)
{
    return dtype == 'f' ? MEASURE_FLOAT : dtype == 'E' ? MEASURE_BFLOAT : MEASURE_HALF;
}

/* Whether a stream can take launches: one that is being captured would repeat them. */
static int is_capturing(Stream stream)
{
    int status = 0;
    return driver.is_capturing(stream, &status) || status;
}

static unsigned blocks_for(const Device *device, const Values *values, int64_t count)
{
    int64_t at_once = THREADS * (values->dtype == 'f' ? 8 : 16); /* values that a block loads */
    int64_t blocks = (count + at_once - 1) / at_once, most = (int64_t)device->processors * PER_PROCESSOR;
    return (unsigned)(blocks < most ? blocks : most);
}

/* Measure a tensor into as many rows as it needs. */
static int launch_measure(Buffer *buffer, Values values, int powers, Stream stream)
{
    const Device *device = buffer->device;
    Function function = device->functions[kernel_of(values.dtype)];
    int64_t most = longest(&values), left = values.count, size = values.dtype == 'f' ? 4 : 2;
    int code = note_stream(buffer, stream);
    while (!code && left) {
        int64_t count = left < most ? left : most;
        Address row = buffer->rows + (Address)(buffer->row_count * ROW);
        Address units = buffer->units + (Address)(buffer->unit_count * UNIT);
        void *arguments[] = {&values.values, &count, &values.units, &values.inner, &powers, &row, &units, NULL};
        code = driver.launch(function, blocks_for(device, &values, count), 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
        buffer->row_count++;
        buffer->unit_count += values.units;
        values.values += count * size;
        left -= count;
    }
    return code;
}

static PyObject *python_measure(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    Buffer *buffer = arg_count == 5 ? buffer_of(args[0]) : NULL;
    if (buffer == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "measure() takes a buffer and 4 other arguments");
        return NULL;
    }
    Values values;
    if (!ask(args[1], args[2], buffer->device, &values) || !longest(&values))
        return PyLong_FromLong(REFUSED);
    int powers = PyLong_AsLong(args[3]) == 2 ? 2 : 4;
    Stream stream = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    int64_t rows = (values.count + longest(&values) - 1) / longest(&values);
    if (buffer->row_count + rows > buffer->row_capacity ||
        buffer->unit_count + rows * values.units > buffer->unit_capacity)
        return PyLong_FromLong(buffer->row_count ? FULL : REFUSED);
    int pushed, code;
    PyThreadState *state = PyEval_SaveThread(); /* the stream may be full */
    code = enter(buffer->device, &pushed);
    int refused = !code && is_capturing(stream);
    if (!code && !refused)
        code = launch_measure(buffer, values, powers, stream);
    leave(pushed);
    PyEval_RestoreThread(state);
    return code ? raise_error("measure a tensor", code) : PyLong_FromLongLong(refused ? 0 : rows);
}

/* --- sending ---------------------------------------------------------------------------------- */

/* Of what there is: the rows' HEADs and UNITs, a number of PAIRs, and room for these. */
static size_t packed_size(const Buffer *buffer)
{
    return (size_t)(buffer->row_count * (HEAD + PAIRS * PAIR) + buffer->unit_count * UNIT + 8);
}

/* When a copy has arrived. */
typedef struct {
    const Device *device;
    Event event;
} Arrival;

static Arrival *arrival_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "telemetry.arrival");
}

static void free_arrival(PyObject *capsule)
{
    Arrival *arrival = arrival_of(capsule);
    driver.destroy_event(arrival->event);
    free(arrival);
}

/* Pack and copy what there is, and clear the buffer behind it. */
static int launch_send(Buffer *buffer, void *host, size_t size, Event *arrived)
{
    const Device *device = buffer->device;
    void *arguments[] = {&buffer->rows, &buffer->row_count, &buffer->units, &buffer->unit_count,
                         &buffer->packed, NULL};
    unsigned blocks = (unsigned)buffer->row_count;
    int code = driver.create_event(arrived, NO_TIMES | WAIT_WITHOUT_SPINNING);
    if (!code)
        code = join_streams(buffer);
    if (!code)
        code = driver.launch(device->functions[PACK], blocks, 1, 1, THREADS, 1, 1, 0, device->side,
                             arguments, NULL);
    if (!code)
        code = driver.copy_to_host(host, buffer->packed, size, device->side);
    if (!code)
        code = driver.record_event(*arrived, device->side);
    return code ? code : clear(buffer);
}

static PyObject *python_send(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    Buffer *buffer = arg_count == 2 ? buffer_of(args[0]) : NULL;
    void *host = buffer ? PyLong_AsVoidPtr(args[1]) : NULL;
    Arrival *arrival = host ? calloc(1, sizeof *arrival) : NULL;
    if (arrival == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "send() takes a buffer and an address");
        return NULL;
    }
    int pushed, code;
    PyThreadState *state = PyEval_SaveThread();
    if (!(code = enter(buffer->device, &pushed)))
        code = launch_send(buffer, host, packed_size(buffer), &arrival->event);
    leave(pushed);
    PyEval_RestoreThread(state);
    arrival->device = buffer->device;
    if (!code)
        return PyCapsule_New(arrival, "telemetry.arrival", free_arrival);
    free(arrival);
    return raise_error("send what was measured", code);
}

/* Rows, units and bytes that are to be sent. */
static PyObject *python_contents(PyObject *module, PyObject *capsule)
{
    (void)module;
    const Buffer *buffer = buffer_of(capsule);
    if (buffer == NULL)
        return NULL;
    return Py_BuildValue("LLn", (long long)buffer->row_count, (long long)buffer->unit_count,
                         (Py_ssize_t)packed_size(buffer));
}

static PyObject *python_clear(PyObject *module, PyObject *capsule)
{
    (void)module;
    Buffer *buffer = buffer_of(capsule);
    if (buffer == NULL)
        return NULL;
    int pushed, code = enter(buffer->device, &pushed);
    if (!code && !(code = join_streams(buffer)))
        code = clear(buffer);
    leave(pushed);
    return code ? raise_error("clear a buffer", code) : Py_NewRef(Py_None);
}

/* Wait until a copy has arrived; or, if that is not wanted, only say whether it has. */
static PyObject *python_wait(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    const Arrival *arrival = arg_count == 2 ? arrival_of(args[0]) : NULL;
    if (arrival == NULL)
        return NULL;
    int pushed, code, waits = args[1] == Py_True;
    PyThreadState *state = PyEval_SaveThread();
    if (!(code = enter(arrival->device, &pushed)))
        code = (waits ? driver.synchronize_event : driver.query_event)(arrival->event);
    leave(pushed);
    PyEval_RestoreThread(state);
    if (code && code != NOT_READY)
        return raise_error("wait for a copy", code);
    return PyBool_FromLong(!code);
}

/* --- the module ------------------------------------------------------------------------------- */

#define METHOD(FUNCTION) ((PyCFunction)(void (*)(void))(FUNCTION))

static PyMethodDef methods[] = {
    {"load", METHOD(python_load), METH_FASTCALL, NULL},
    {"open", METHOD(python_open), METH_FASTCALL, NULL},
    {"buffer", METHOD(python_buffer), METH_FASTCALL, NULL},
    {"measure", METHOD(python_measure), METH_FASTCALL, NULL},
    {"contents", python_contents, METH_O, NULL},
    {"send", METHOD(python_send), METH_FASTCALL, NULL},
    {"clear", python_clear, METH_O, NULL},
    {"wait", METHOD(python_wait), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "telemetry.measure._cuda", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cuda(void)
{
    return PyModuleDef_Init(&definition);
}

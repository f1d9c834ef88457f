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
typedef struct {
    DRIVER_FUNCTIONS(DECLARE)
} Functions;
static Functions driver;

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
    Functions found_here = {0};
#define FIND(NAME, SYMBOL, ARGUMENTS)                             \
    if (library != NULL) {                                        \
        void *found = find_symbol(library, #SYMBOL);              \
        memcpy(&found_here.NAME, &found, sizeof found);           \
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
    driver = found_here;
    int code = driver.initialize(0);
    return code ? raise_error("initialize", code) : Py_NewRef(Py_None);
}

/* --- a device --------------------------------------------------------------------------------- */

/* As kernels.cu describes them: one module for each dtype, and one that packs what they find. Of some
 * there are two, for 2 and 4 powers. */
enum { PACK_HEADS, PACK_PAIRS, MEASURE = 0, MEASURE_LAST = 2, MEASURE_MIDDLE = 4, MEASURE_MANY = 6,
       NORMS = 8, KERNELS };
static const char *const PACKING[KERNELS] = {"pack_heads", "pack_pairs"};
static const char *const MEASURING[KERNELS] = {
    "measure_2",        "measure_4",      "measure_last_2", "measure_last_4", "measure_middle_2",
    "measure_middle_4", "measure_many_2", "measure_many_4", "norms",
};
static const char DTYPES[] = "fEed45"; /* of the modules behind that which packs */
enum { MODULES = 7 };

typedef struct {
    const char *values;
    uint32_t elements, row, part, parts;
} Chunk;

enum {
    THREADS = 512,
    PER_WARP = THREADS / 32,   /* warps of a block, of which each takes a small chunk */
    PER_BLOCK = 16384,         /* elements for which one more block is worth while */
    PER_PROCESSOR = 2,         /* blocks */
    MOST_BLOCKS = 65535,
    MOST = 0x7FFFFFF0,         /* elements of a row */
    SMALL_CHUNK = 2048,        /* elements, at most */
    LARGE_CHUNK = 65536,
    ROW = 16432,               /* bytes on the device */
    CODES = 8,                 /* of a unit */
    PARTIAL = 32,              /* of a block */
    HEAD = 112,                /* bytes on the host, see records/rows.py */
    UNIT = 8,
    PAIR = 8,
    UNITS = 320,               /* that there is room for, for each row on average */
    PARTIALS = 160,
    PAIRS = 256
};

enum {
    NON_BLOCKING = 1,          /* a stream that does not wait for the default stream */
    WAIT_WITHOUT_SPINNING = 1, /* flags of events */
    NO_TIMES = 2,
    NOT_READY = 600, /* errors */
    TOO_FEW_RESOURCES = 701,
    PROCESSORS = 16,           /* attributes of a device and of a function */
    THREADS_AT_MOST = 0,
    STREAMS = 16               /* on which tensors of one step are measured, at most */
};

typedef struct {
    Context context;
    Stream side; /* on which rows are packed, copied and cleared */
    int ordinal, processors;
    Function functions[MODULES][KERNELS];
} Device;

/* Make the device's context current; tells whether it was put on top of another. */
static int enter(const Device *device, int *pushed)
{
    Context current = NULL;
    int code = driver.get_current(&current);
    int is_other = !code && current != device->context;
    if (is_other)
        code = driver.push_context(device->context);
    *pushed = is_other && !code;
    return code;
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

/* Have the functions of a module at hand before they are needed: loading them may wait. */
static const char *load_module(const char *image, const char *const *names, Function *functions,
                               int *code)
{
    Module module;
    int threads;
    if ((*code = driver.load_module(&module, image)))
        return "load the kernels";
    for (int i = 0; i < KERNELS && names[i]; i++) {
        if ((*code = driver.get_function(&functions[i], module, names[i])) ||
            (*code = driver.get_function_attribute(&threads, THREADS_AT_MOST, functions[i])))
            return names[i];
        if (threads < THREADS && (*code = TOO_FEW_RESOURCES))
            return names[i];
    }
    return NULL;
}

static const char *open_device(Device *device, const char *const *images, int *code)
{
    int number, pushed;
    if ((*code = driver.get_device(&number, device->ordinal)))
        return "find the device";
    if ((*code = driver.retain_context(&device->context, number)))
        return "get its context";
    if ((*code = driver.get_attribute(&device->processors, PROCESSORS, number)))
        return "count its processors";
    if ((*code = enter(device, &pushed)))
        return "enter its context";
    const char *failed = NULL;
    for (int i = 0; !failed && i < MODULES; i++)
        failed = load_module(images[i], i ? MEASURING : PACKING, device->functions[i], code);
    if (!failed && (*code = driver.create_stream(&device->side, NON_BLOCKING)))
        failed = "create a stream";
    leave(pushed);
    return failed;
}

static PyObject *python_open(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 2 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != MODULES) {
        PyErr_SetString(PyExc_TypeError, "open() takes an int and seven images");
        return NULL;
    }
    const char *images[MODULES];
    for (int i = 0; i < MODULES; i++)
        if ((images[i] = PyBytes_AsString(PyTuple_GetItem(args[1], i))) == NULL)
            return NULL;
    long ordinal = PyLong_AsLong(args[0]);
    Device *device = PyErr_Occurred() ? NULL : calloc(1, sizeof *device);
    if (device == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    device->ordinal = (int)ordinal;
    int code;
    PyThreadState *state = PyEval_SaveThread();
    const char *failed = open_device(device, images, &code);
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
    Address rows, codes, partials, packed; /* of the device's memory; the first two are zeroed */
    int64_t row_capacity, unit_capacity, partial_capacity, row_count, unit_count, partial_count;
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
        code = driver.fill(buffer->codes, 0, (size_t)buffer->unit_count * CODES, side);
    buffer->row_count = buffer->unit_count = buffer->partial_count = buffer->stream_count = 0;
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
    int64_t rows = size / (ROW + UNITS * (CODES + UNIT) + PARTIALS * PARTIAL + HEAD + PAIRS * PAIR);
    buffer->row_count = buffer->row_capacity = rows;
    buffer->unit_count = buffer->unit_capacity = rows * UNITS;
    buffer->partial_capacity = rows * PARTIALS;
    buffer->rows = (Address)first;
    buffer->codes = buffer->rows + (Address)(rows * ROW);
    buffer->partials = buffer->codes + (Address)(buffer->unit_capacity * CODES);
    buffer->packed = buffer->partials + (Address)(buffer->partial_capacity * PARTIAL);
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

enum { REFUSED = 0, FULL = -1 }; /* instead of a number of rows */

static int module_of(int dtype)
{
    const char *found = strchr(DTYPES, dtype);
    return dtype && found ? (int)(found - DTYPES) + 1 : 0;
}

static int64_t size_of(const Values *values)
{
    switch (values->dtype) {
    case 'd': return 8;
    case 'f': return 4;
    case 'e': case 'E': return 2;
    default: return 1;
    }
}

static int64_t round_up(int64_t count, int64_t by)
{
    return (count + by - 1) / by;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* How many elements a row may be of: all, or as many whole rows of units as are below 2^31. */
static int64_t longest(const Values *values)
{
    int64_t together = values->units ? values->units * values->inner : PER_BLOCK;
    return values->count <= MOST ? values->count : MOST / together * together;
}

/* What kernels would read of a tensor; 0 if none takes it. */
static int ask(PyObject *object, PyObject *axis, const Device *device, Values *values)
{
    return is_of_type(object, tensor_types) && describe(object, exchange, axis, values) &&
           values->count && values->device_type == ON_CUDA && values->device == device->ordinal &&
           module_of(values->dtype) && (uintptr_t)values->values % (uintptr_t)size_of(values) == 0 &&
           longest(values) && round_up(values->units, THREADS) <= MOST_BLOCKS;
}

static int64_t blocks_for(const Device *device, const Values *values, int64_t count)
{
    int64_t blocks = least(round_up(count, PER_BLOCK), PER_PROCESSOR * device->processors);
    int64_t wanted = values->inner == 1 ? round_up(values->units, THREADS) : 0;
    return blocks < wanted ? wanted : blocks;
}

/* Rows for a tensor, REFUSED if it cannot be in any buffer, FULL if not in this one any more. */
static int64_t rows_for(const Buffer *buffer, const Values *values)
{
    int64_t most = longest(values), rows = round_up(values->count, most);
    int64_t partials = rows * blocks_for(buffer->device, values, most);
    if (buffer->row_count + rows <= buffer->row_capacity &&
        buffer->unit_count + rows * values->units <= buffer->unit_capacity &&
        buffer->partial_count + partials <= buffer->partial_capacity)
        return rows;
    return buffer->row_count ? FULL : REFUSED;
}

/* Whether a stream's work is being recorded: what we launch would be repeated with it. */
static int is_capturing(Stream stream)
{
    int status = 0;
    return driver.is_capturing(stream, &status) || status;
}

static int launch(const Device *device, int module, int kernel, int64_t blocks, Stream stream,
                  void **arguments)
{
    return driver.launch(device->functions[module][kernel], (unsigned)blocks, 1, 1, THREADS, 1, 1,
                         0, stream, arguments, NULL);
}

/* Measure a tensor into rows for which there is room. */
static int launch_measure(Buffer *buffer, const Values *values, int powers, Stream stream)
{
    int kernel = !values->units ? MEASURE : values->inner == 1 ? MEASURE_LAST : MEASURE_MIDDLE;
    const char *next = values->values;
    int code = note_stream(buffer, stream);
    for (int64_t left = values->count; !code && left;) {
        uint64_t count = (uint64_t)least(left, longest(values));
        int64_t blocks = blocks_for(buffer->device, values, (int64_t)count);
        Address row = buffer->rows + (Address)(buffer->row_count * ROW);
        Address partials = buffer->partials + (Address)(buffer->partial_count * PARTIAL);
        Address codes = buffer->codes + (Address)(buffer->unit_count * CODES);
        void *arguments[] = {(void *)&next, &count, &row, &partials, &codes,
                             (void *)&values->units, (void *)&values->inner, NULL};
        code = launch(buffer->device, module_of(values->dtype), kernel + (powers == 4), blocks,
                      stream, arguments);
        buffer->row_count++;
        buffer->unit_count += values->units;
        buffer->partial_count += blocks;
        next += (int64_t)count * size_of(values);
        left -= (int64_t)count;
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
    int64_t rows = ask(args[1], args[2], buffer->device, &values) ? rows_for(buffer, &values) : 0;
    int powers = PyLong_AsLong(args[3]) == 2 ? 2 : 4;
    Stream stream = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (rows <= 0)
        return PyLong_FromLongLong(rows);
    int pushed;
    PyThreadState *state = PyEval_SaveThread(); /* the stream may be full */
    int code = enter(buffer->device, &pushed);
    if (!code && is_capturing(stream))
        rows = REFUSED;
    else if (!code)
        code = launch_measure(buffer, &values, powers, stream);
    leave(pushed);
    PyEval_RestoreThread(state);
    return code ? raise_error("measure a tensor", code) : PyLong_FromLongLong(rows);
}

/* --- many tensors ----------------------------------------------------------------------------- */

static int is_large(const Values *values)
{
    return values->count > SMALL_CHUNK;
}

/* The chunks of those tensors of one module that have a row: large ones first, or all if norms are
 * taken; how many there are, of which so many large. */
static uint32_t fill_chunks(const Values *tensors, const int64_t *rows, Py_ssize_t size, int module,
                            uint32_t *large, Chunk *chunks)
{
    uint32_t count = 0;
    for (int small = 0; small < 2; small++) {
        for (Py_ssize_t i = 0; i < size; i++) {
            const Values *values = &tensors[i];
            if (rows[i] < 0 || module_of(values->dtype) != module || is_large(values) == small)
                continue;
            uint32_t parts = (uint32_t)round_up(values->count, LARGE_CHUNK);
            for (uint32_t part = 0; chunks && part < parts; part++) {
                int64_t first = (int64_t)part * LARGE_CHUNK;
                uint32_t elements = (uint32_t)least(LARGE_CHUNK, values->count - first);
                Chunk chunk = {values->values + first * size_of(values), elements,
                               (uint32_t)rows[i], part, parts};
                chunks[count + part] = chunk;
            }
            count += parts;
        }
        *large = small ? *large : count;
    }
    return count;
}

/* Tables of chunks, one for each module that is needed: (module, bytes, large, count, address of its
 * partial sums). */
static PyObject *tables_of(const Values *tensors, const int64_t *rows, Py_ssize_t size,
                           Address partials)
{
    PyObject *tables = PyList_New(0);
    for (int module = 1; tables && module < MODULES; module++) {
        uint32_t large = 0, count = fill_chunks(tensors, rows, size, module, &large, NULL);
        PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(Chunk)));
        if (bytes && count)
            fill_chunks(tensors, rows, size, module, &large,
                        (Chunk *)(void *)PyByteArray_AsString(bytes));
        PyObject *table = bytes ? Py_BuildValue("iNIIK", module, bytes, large, count, partials)
                                : NULL;
        partials += count * PARTIAL;
        if (table == NULL || (count && PyList_Append(tables, table)))
            Py_CLEAR(tables);
        Py_XDECREF(table);
    }
    return tables;
}

/* A row of a buffer for a tensor among many, and blocks; whether there is room. */
static int take_row(Buffer *buffer, const Values *values, int64_t *row)
{
    int64_t chunks = round_up(values->count, LARGE_CHUNK);
    if (buffer->row_count == buffer->row_capacity ||
        buffer->partial_count + chunks > buffer->partial_capacity)
        return 0;
    *row = buffer->row_count++;
    buffer->partial_count += chunks;
    return 1;
}

/* plan(device, buffer or None, tensors, stream): whether each can be measured with others, or FULL;
 * and the tables for that. Rows are those of the buffer, or without one the places in the list. */
static PyObject *python_plan(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    const Device *device = arg_count == 4 && PyList_Check(args[2]) ? device_of(args[0]) : NULL;
    Buffer *buffer = device && args[1] != Py_None ? buffer_of(args[1]) : NULL;
    Stream stream = device ? PyLong_AsVoidPtr(args[3]) : NULL;
    if (device == NULL || PyErr_Occurred()) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "plan() takes a device, a buffer, a list, a stream");
        return NULL;
    }
    Py_ssize_t size = PyList_Size(args[2]);
    Values *tensors = calloc((size_t)size + 1, sizeof *tensors);
    int64_t *rows = calloc((size_t)size + 1, sizeof *rows);
    PyObject *taken = PyList_New(size), *tables = NULL;
    Address partials = buffer ? buffer->partials + (Address)(buffer->partial_count * PARTIAL) : 0;
    int pushed, is_full = 0, refuses = enter(device, &pushed) || is_capturing(stream);
    leave(pushed);
    for (Py_ssize_t i = 0; tensors && rows && taken && i < size; i++) {
        int fits = !refuses && ask(PyList_GetItem(args[2], i), Py_None, device, &tensors[i]) &&
                   tensors[i].count <= MOST;
        rows[i] = fits && !buffer ? i : -1;
        if (fits && buffer && !is_full && !take_row(buffer, &tensors[i], &rows[i]))
            is_full = 1;
        fits = rows[i] >= 0 ? 1 : fits && buffer->row_count ? FULL : REFUSED;
        PyList_SetItem(taken, i, PyLong_FromLong(fits));
    }
    if (tensors && rows && taken)
        tables = tables_of(tensors, rows, size, partials);
    free(tensors);
    free(rows);
    if (tables == NULL) {
        Py_XDECREF(taken);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return Py_BuildValue("NN", taken, tables);
}

/* Whole numbers from the first of some arguments on. */
static int read_numbers(PyObject *const *args, int count, uint64_t *numbers)
{
    for (int i = 0; i < count; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(args[i]);
    return !PyErr_Occurred();
}

/* measure_many(buffer, module, large, count, address of the table, address of the partial sums,
 * powers, stream) */
static PyObject *python_measure_many(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    uint64_t numbers[7] = {0};
    Buffer *buffer = arg_count == 8 ? buffer_of(args[0]) : NULL;
    if (buffer == NULL || !read_numbers(args + 1, 7, numbers) || numbers[0] >= MODULES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "measure_many() takes a buffer and 7 numbers");
        return NULL;
    }
    uint64_t large = numbers[1], count = numbers[2];
    int64_t blocks = (int64_t)large + round_up((int64_t)(count - large), PER_WARP);
    void *arguments[] = {&numbers[3], &large, &count, &buffer->rows, &numbers[4], NULL};
    Stream stream = (Stream)(uintptr_t)numbers[6];
    int pushed;
    PyThreadState *state = PyEval_SaveThread();
    int code = enter(buffer->device, &pushed);
    if (!code && !(code = note_stream(buffer, stream)))
        code = launch(buffer->device, (int)numbers[0], MEASURE_MANY + (numbers[5] == 4), blocks,
                      stream, arguments);
    leave(pushed);
    PyEval_RestoreThread(state);
    return code ? raise_error("measure many tensors", code) : Py_NewRef(Py_None);
}

/* norms(device, module, count, address of the table, address of the norms, address of the partial
 * sums, stream) */
static PyObject *python_norms(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    uint64_t numbers[6] = {0};
    const Device *device = arg_count == 7 ? device_of(args[0]) : NULL;
    if (device == NULL || !read_numbers(args + 1, 6, numbers) || numbers[0] >= MODULES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "norms() takes a device and 6 numbers");
        return NULL;
    }
    void *arguments[] = {&numbers[2], &numbers[3], &numbers[4], NULL};
    int pushed;
    PyThreadState *state = PyEval_SaveThread();
    int code = enter(device, &pushed);
    if (!code)
        code = launch(device, (int)numbers[0], NORMS, (int64_t)numbers[1],
                      (Stream)(uintptr_t)numbers[5], arguments);
    leave(pushed);
    PyEval_RestoreThread(state);
    return code ? raise_error("take norms", code) : Py_NewRef(Py_None);
}

/* --- sending ---------------------------------------------------------------------------------- */

/* Of what there is: the rows' HEADs, their UNITs, and room for their PAIRs. */
static size_t packed_size(const Buffer *buffer)
{
    return (size_t)(buffer->row_count * (HEAD + PAIRS * PAIR) + buffer->unit_count * UNIT);
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
    int64_t rows = buffer->row_count;
    uint64_t code_count = 2 * (uint64_t)buffer->unit_count, capacity = (uint64_t)(rows * PAIRS);
    Address extremes = buffer->packed + (Address)(rows * HEAD);
    Address pairs = extremes + (Address)(buffer->unit_count * UNIT);
    void *of_heads[] = {&buffer->rows, &buffer->packed, &buffer->codes, &extremes, &code_count, NULL};
    void *of_pairs[] = {&buffer->rows, &buffer->packed, &pairs, &capacity, NULL};
    int code = driver.create_event(arrived, NO_TIMES | WAIT_WITHOUT_SPINNING);
    if (!code)
        code = join_streams(buffer);
    if (!code)
        code = launch(device, 0, PACK_HEADS, rows, device->side, of_heads);
    if (!code)
        code = launch(device, 0, PACK_PAIRS, rows, device->side, of_pairs);
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
    {"plan", METHOD(python_plan), METH_FASTCALL, NULL},
    {"measure_many", METHOD(python_measure_many), METH_FASTCALL, NULL},
    {"norms", METHOD(python_norms), METH_FASTCALL, NULL},
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

/* Launches the kernels of kernels.cu on tensors in a GPU's memory; _cuda.pyi documents the functions.
 *
 * The kernels write the rows of a step's tensors into a buffer, each on its tensor's stream. Arguments
 * of kernels are checked first, because an invalid address ends the training.
 *
 * The driver is loaded at run time, so this builds and loads without CUDA. Python's limited API only.
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
typedef unsigned long long Address;

/* Name here, name of this signature in every driver, and arguments. */
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
    X(is_capturing, cuStreamIsCapturing, (Stream stream, int *status))                            \
    X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))

#define DECLARE(NAME, SYMBOL, ARGUMENTS) int(CALL *NAME) ARGUMENTS;
typedef struct {
    DRIVER_FUNCTIONS(DECLARE)
} Functions;
static Functions driver;

enum { OUT_OF_MEMORY = 2 }; /* an error */

/* Raise an exception for an error of the driver. */
static PyObject *raise_error(const char *doing, int code)
{
    const char *text = NULL;
    if (driver.get_error_string(code, &text) || text == NULL)
        text = "unknown";
    return PyErr_Format(code == OUT_OF_MEMORY ? PyExc_MemoryError : PyExc_RuntimeError,
                        "CUDA, to %s: error %d, %s", doing, code, text);
}

/* Raise TypeError, unless an exception is set. */
static PyObject *misused(const char *takes)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, takes);
    return NULL;
}

static PyObject *tensor_types; /* classes that tensors may be of */
static const Exchange *exchange;

static PyObject *python_load(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 3 || !PyTuple_Check(args[1]))
        return misused("load() takes a path, a tuple of types and a capsule");
    exchange = args[2] == Py_None ? NULL : exchange_of(args[2]);
    if (exchange == NULL && args[2] != Py_None && !PyErr_Occurred())
        PyErr_SetString(PyExc_OSError, "PyTorch describes tensors by another version of DLPack");
    if (PyErr_Occurred())
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

/* Kernels of kernels.cu in the module of each dtype; most have variants for 2 and for 4 powers. */
enum { MEASURE = 0, MEASURE_WIDE = 2, MEASURE_LAST = 4, MEASURE_MIDDLE = 6, MEASURE_MANY = 8, NORMS = 10,
       KERNELS };
static const char *const NAMES[KERNELS] = {
    "measure_2",        "measure_4",        "measure_wide_2", "measure_wide_4", "measure_last_2",
    "measure_last_4",   "measure_middle_2", "measure_middle_4", "measure_many_2", "measure_many_4",
    "norms",
};
static const char DTYPES[] = "feE"; /* of the modules */
enum { MODULES = 3 };

typedef struct {
    const char *values;
    uint32_t elements, row, part, parts;
} Chunk;

enum {
    THREADS = 512,
    PER_BLOCK = 16384,         /* elements that justify one more block */
    PER_PROCESSOR = 2,         /* blocks */
    MOST_BLOCKS = 65535,
    MOST = 0x7FFFFFF0,         /* elements of a tensor */
    CHUNK = 65536,             /* elements */
    WHOLE = 16,                /* bytes that a thread reads at once */
    ROW = 16464,               /* bytes */
    UNIT = 8,
    PARTIAL = 32,              /* of a block */
    UNITS = 320,               /* capacity, for each row on average */
    PARTIALS = 160
};

enum {
    PROCESSORS = 16, /* attributes of a device and of a function */
    THREADS_AT_MOST = 0,
    RELAXED = 2      /* a mode of capturing */
};

typedef struct {
    Context context;
    int ordinal, processors;
    Function functions[MODULES][KERNELS];
} Device;

/* State that leave() restores. */
typedef struct {
    int pushed, mode;
} Entered;

/* Make the device's context current. Until leave(), calls do not invalidate a capture of a CUDA graph
 * by another thread, as they would in the default mode. */
static int enter(const Device *device, Entered *entered)
{
    Context current = NULL;
    entered->mode = RELAXED;
    entered->pushed = 0;
    int code = driver.exchange_capture_mode(&entered->mode);
    if (!code)
        code = driver.get_current(&current);
    if (!code && current != device->context)
        entered->pushed = !(code = driver.push_context(device->context));
    return code;
}

static void leave(Entered *entered)
{
    Context popped;
    if (entered->pushed)
        driver.pop_context(&popped);
    driver.exchange_capture_mode(&entered->mode);
}

static Device *device_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "telemetry.device");
}

/* Load a module and its functions before their first launch: loading may synchronize. */
static const char *load_module(const char *image, Function *functions, int *code)
{
    Module module;
    int threads;
    if ((*code = driver.load_module(&module, image)))
        return "load the kernels";
    for (int i = 0; i < KERNELS; i++)
        if ((*code = driver.get_function(&functions[i], module, NAMES[i])) ||
            (*code = driver.get_function_attribute(&threads, THREADS_AT_MOST, functions[i])))
            return NAMES[i];
    return NULL;
}

static const char *open_device(Device *device, const char *const *images, int *code)
{
    int number;
    Entered entered;
    if ((*code = driver.get_device(&number, device->ordinal)))
        return "find the device";
    if ((*code = driver.retain_context(&device->context, number)))
        return "get its context";
    if ((*code = driver.get_attribute(&device->processors, PROCESSORS, number)))
        return "count its processors";
    const char *failed = (*code = enter(device, &entered)) ? "enter its context" : NULL;
    for (int i = 0; !failed && i < MODULES; i++)
        failed = load_module(images[i], device->functions[i], code);
    leave(&entered);
    return failed;
}

static PyObject *python_open(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    if (arg_count != 2 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != MODULES)
        return misused("open() takes an int and an image for each dtype");
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
    if (!failed) /* never freed: buffers refer to it */
        return PyCapsule_New(device, "telemetry.device", NULL);
    free(device);
    return raise_error(failed, code);
}

/* --- a buffer --------------------------------------------------------------------------------- */

/* Rows of one step; not thread-safe. Rows fill the memory upwards, and the codes of units downwards
 * from the first row, so that one copy and one memset cover both. */
typedef struct {
    const Device *device;
    Address memory, rows, partials;
    int64_t row_capacity, unit_capacity, partial_capacity, row_count, unit_count, partial_count;
} Buffer;

static Buffer *buffer_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "telemetry.buffer");
}

static PyObject *python_buffer(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    const Device *device = arg_count == 3 ? device_of(args[0]) : NULL;
    Address memory = device ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    int64_t rows = device ? PyLong_AsLongLong(args[2]) / (ROW + UNITS * UNIT + PARTIALS * PARTIAL) : 0;
    Buffer *buffer = rows > 0 && memory % WHOLE == 0 ? calloc(1, sizeof *buffer) : NULL;
    if (buffer == NULL || PyErr_Occurred()) {
        free(buffer);
        return misused("buffer() takes a device, an aligned address and a size");
    }
    buffer->device = device;
    buffer->memory = memory;
    buffer->rows = memory + (Address)(rows * UNITS * UNIT);
    buffer->partials = buffer->rows + (Address)(rows * ROW);
    buffer->row_capacity = rows;
    buffer->unit_capacity = rows * UNITS;
    buffer->partial_capacity = rows * PARTIALS;
    return PyCapsule_New(buffer, "telemetry.buffer", NULL); /* never freed */
}

/* Return the numbers of rows and units and their range of bytes, and mark the buffer as empty. */
static PyObject *python_take(PyObject *module, PyObject *capsule)
{
    (void)module;
    Buffer *buffer = buffer_of(capsule);
    if (buffer == NULL)
        return NULL;
    long long rows = buffer->row_count, units = buffer->unit_count;
    long long middle = (long long)(buffer->rows - buffer->memory);
    buffer->row_count = buffer->unit_count = buffer->partial_count = 0;
    return Py_BuildValue("LLLL", rows, units, middle - units * UNIT, middle + rows * ROW);
}

/* --- measuring -------------------------------------------------------------------------------- */

enum { TAKEN = 1, REFUSED = 0, FULL = -1 };

static int module_of(int dtype)
{
    const char *found = dtype ? strchr(DTYPES, dtype) : NULL;
    return found ? (int)(found - DTYPES) : -1;
}

static int64_t size_of(const Values *values)
{
    return values->dtype == 'f' ? 4 : 2;
}

static int64_t round_up(int64_t count, int64_t by)
{
    return (count + by - 1) / by;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Describe a tensor of the device, or a tuple: address, elements, letter of the dtype, units, inner. */
static int describe_any(PyObject *object, PyObject *axis, const Device *device, Values *values)
{
    unsigned long long address;
    long long count, units, inner;
    if (!PyTuple_Check(object))
        return exchange && is_of_type(object, tensor_types) &&
               describe(object, exchange, axis, values) && values->device_type == ON_CUDA &&
               values->device == device->ordinal;
    if (!PyArg_ParseTuple(object, "KLiLL", &address, &count, &values->dtype, &units, &inner)) {
        PyErr_Clear();
        return 0;
    }
    values->values = (char *)(uintptr_t)address;
    values->count = count;
    values->units = units;
    values->inner = inner;
    return 1;
}

/* Describe a tensor; 0 if the kernels do not take it. */
static int ask(PyObject *object, PyObject *axis, const Device *device, Values *values)
{
    return describe_any(object, axis, device, values) && values->values && values->count > 0 &&
           values->count <= MOST && module_of(values->dtype) >= 0 &&
           (uintptr_t)values->values % (uintptr_t)size_of(values) == 0 &&
           round_up(values->units, THREADS) <= MOST_BLOCKS;
}

static int kernel_for(const Values *values)
{
    if (!values->units)
        return MEASURE;
    if (values->inner != 1)
        return MEASURE_MIDDLE;
    int whole = (uintptr_t)values->values % WHOLE == 0 && values->units * size_of(values) % WHOLE == 0;
    return whole ? MEASURE_WIDE : MEASURE_LAST;
}

static int64_t blocks_for(const Device *device, const Values *values)
{
    int64_t blocks = least(round_up(values->count, PER_BLOCK), PER_PROCESSOR * device->processors);
    int64_t wanted = values->inner == 1 ? round_up(values->units, THREADS) : 0;
    return blocks < wanted ? wanted : blocks;
}

/* Check that a row with its units and partial sums fits: TAKEN; FULL if it needs another buffer; REFUSED
 * if it fits into none. */
static int room_for(const Buffer *buffer, int64_t units, int64_t partials)
{
    if (buffer->row_count < buffer->row_capacity &&
        buffer->unit_count + units <= buffer->unit_capacity &&
        buffer->partial_count + partials <= buffer->partial_capacity)
        return TAKEN;
    return buffer->row_count ? FULL : REFUSED;
}

/* Whether a stream is captured: replays of the graph would repeat our launches. */
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

/* Queue the measurement of a tensor whose row fits. */
static int launch_measure(Buffer *buffer, const Values *values, int powers, Stream stream)
{
    int64_t blocks = blocks_for(buffer->device, values);
    Address row = buffer->rows + (Address)(buffer->row_count * ROW);
    Address partials = buffer->partials + (Address)(buffer->partial_count * PARTIAL);
    Address codes = buffer->rows - (Address)((buffer->unit_count + values->units) * UNIT);
    void *arguments[] = {(void *)&values->values, (void *)&values->count, &row, &partials, &codes,
                         (void *)&values->units, (void *)&values->inner, NULL};
    int code = launch(buffer->device, module_of(values->dtype), kernel_for(values) + (powers == 4),
                      blocks, stream, arguments);
    if (code)
        return code;
    buffer->row_count++;
    buffer->unit_count += values->units;
    buffer->partial_count += blocks;
    return 0;
}

/* Keeps the interpreter lock: getting it back may take longer than the launch. */
static PyObject *python_measure(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    Buffer *buffer = arg_count == 5 ? buffer_of(args[0]) : NULL;
    if (buffer == NULL)
        return misused("measure() takes a buffer and 4 other arguments");
    Values values;
    Entered entered;
    int powers = PyLong_AsLong(args[3]) == 2 ? 2 : 4, code = 0;
    Stream stream = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    int taken = REFUSED;
    if (ask(args[1], args[2], buffer->device, &values))
        taken = room_for(buffer, values.units, blocks_for(buffer->device, &values));
    if (taken == TAKEN) {
        code = enter(buffer->device, &entered);
        if (!code && is_capturing(stream))
            taken = REFUSED;
        else if (!code)
            code = launch_measure(buffer, &values, powers, stream);
        leave(&entered);
    }
    return code ? raise_error("measure a tensor", code) : PyLong_FromLong(taken);
}

/* --- many tensors ----------------------------------------------------------------------------- */

/* Write the chunks of tensors that have a row in one module; return their number. */
static uint32_t fill_chunks(const Values *tensors, const int64_t *rows, Py_ssize_t size, int module,
                            Chunk *chunks)
{
    uint32_t count = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        const Values *values = &tensors[i];
        if (rows[i] < 0 || module_of(values->dtype) != module)
            continue;
        uint32_t parts = (uint32_t)round_up(values->count, CHUNK);
        for (uint32_t part = 0; chunks && part < parts; part++) {
            int64_t first = (int64_t)part * CHUNK;
            uint32_t elements = (uint32_t)least(CHUNK, values->count - first);
            Chunk chunk = {values->values + first * size_of(values), elements, (uint32_t)rows[i], part,
                           parts};
            chunks[count + part] = chunk;
        }
        count += parts;
    }
    return count;
}

/* Return a table of chunks for each module in use: (module, bytes, count, address of partial sums). */
static PyObject *tables_of(const Values *tensors, const int64_t *rows, Py_ssize_t size,
                           Address partials)
{
    PyObject *tables = PyList_New(0);
    for (int module = 0; tables && module < MODULES; module++) {
        uint32_t count = fill_chunks(tensors, rows, size, module, NULL);
        if (!count)
            continue;
        PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(Chunk)));
        if (bytes)
            fill_chunks(tensors, rows, size, module, (Chunk *)(void *)PyByteArray_AsString(bytes));
        PyObject *table = bytes ? Py_BuildValue("iNIK", module, bytes, count, partials) : NULL;
        partials += count * PARTIAL;
        if (table == NULL || PyList_Append(tables, table))
            Py_CLEAR(tables);
        Py_XDECREF(table);
    }
    return tables;
}

static PyObject *python_plan(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    const Device *device = arg_count == 4 && PyList_Check(args[2]) ? device_of(args[0]) : NULL;
    Buffer *buffer = device && args[1] != Py_None ? buffer_of(args[1]) : NULL;
    Stream stream = device ? PyLong_AsVoidPtr(args[3]) : NULL;
    if (device == NULL || PyErr_Occurred())
        return misused("plan() takes a device, a buffer, a list, a stream");
    Py_ssize_t size = PyList_Size(args[2]);
    Values *tensors = calloc((size_t)size + 1, sizeof *tensors);
    int64_t *rows = calloc((size_t)size + 1, sizeof *rows);
    PyObject *found = PyList_New(size), *tables = NULL;
    Address partials = buffer ? buffer->partials + (Address)(buffer->partial_count * PARTIAL) : 0;
    Entered entered;
    int is_full = 0, refuses = enter(device, &entered) || is_capturing(stream);
    leave(&entered);
    for (Py_ssize_t i = 0; tensors && rows && found && i < size; i++) {
        int taken = !refuses && ask(PyList_GetItem(args[2], i), Py_None, device, &tensors[i]);
        int64_t parts = round_up(tensors[i].count, CHUNK);
        if (taken && buffer && !is_full) {
            is_full = (taken = room_for(buffer, 0, parts)) == FULL;
        } else if (taken && buffer) {
            taken = FULL;
        }
        rows[i] = taken != TAKEN ? -1 : buffer ? buffer->row_count++ : i;
        if (buffer && taken == TAKEN)
            buffer->partial_count += parts;
        PyList_SetItem(found, i, PyLong_FromLong(taken));
    }
    if (tensors && rows && found)
        tables = tables_of(tensors, rows, size, partials);
    free(tensors);
    free(rows);
    if (tables == NULL) {
        Py_XDECREF(found);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return Py_BuildValue("NN", found, tables);
}

static PyObject *python_launch_table(PyObject *module, PyObject *const *args, Py_ssize_t arg_count)
{
    (void)module;
    uint64_t numbers[7] = {0};
    const Device *device = arg_count == 9 ? device_of(args[0]) : NULL;
    Buffer *buffer = device && args[1] != Py_None ? buffer_of(args[1]) : NULL;
    for (int i = 0; device && i < 7; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(args[2 + i]);
    if (device == NULL || PyErr_Occurred() || numbers[0] >= MODULES)
        return misused("launch_table() takes a device, a buffer, 7 numbers");
    void *rows = buffer ? (void *)&buffer->rows : (void *)&numbers[3];
    void *arguments[] = {&numbers[2], rows, &numbers[4], NULL};
    int kernel = buffer ? MEASURE_MANY + (numbers[5] == 4) : NORMS;
    Stream stream = (Stream)(uintptr_t)numbers[6];
    Entered entered;
    int code = enter(device, &entered);
    if (!code)
        code = launch(device, (int)numbers[0], kernel, (int64_t)numbers[1], stream, arguments);
    leave(&entered);
    return code ? raise_error("measure many tensors", code) : Py_NewRef(Py_None);
}

/* --- the module ------------------------------------------------------------------------------- */

#define METHOD(FUNCTION) ((PyCFunction)(void (*)(void))(FUNCTION))

static PyMethodDef methods[] = {
    {"load", METHOD(python_load), METH_FASTCALL, NULL},
    {"open", METHOD(python_open), METH_FASTCALL, NULL},
    {"buffer", METHOD(python_buffer), METH_FASTCALL, NULL},
    {"measure", METHOD(python_measure), METH_FASTCALL, NULL},
    {"plan", METHOD(python_plan), METH_FASTCALL, NULL},
    {"launch_table", METHOD(python_launch_table), METH_FASTCALL, NULL},
    {"take", python_take, METH_O, NULL},
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

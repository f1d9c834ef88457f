/* The parts of DLPack 1, https://github.com/dmlc/dlpack, by which the extension reads PyTorch's
 * tensors. Include after Python.h. */

#ifndef TELEMETRY_DLPACK_H
#define TELEMETRY_DLPACK_H

#include <stdint.h>

enum { ON_CPU = 1 }; /* type of device */

typedef struct {
    char *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

/* Target of the capsule ``__dlpack_c_exchange_api__`` of a class of tensors. */
typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous, *allocate, *export_managed, *import_managed;
    int (*describe)(void *tensor, DLTensor *description); /* borrowed from the tensor */
} Exchange;

/* A dense tensor of floats; its shape is [outer, units, inner], or any if ``units`` is 0. */
typedef struct {
    char *values;
    int64_t count, units, inner;
    int device_type, device;
    int dtype; /* its letter: f, d, e, or E for bfloat16 */
} Values;

/* Return the capsule's target, or NULL if it has another version of DLPack. */
static const Exchange *exchange_of(PyObject *capsule)
{
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    return exchange && exchange->version.major == 1 && exchange->describe ? exchange : NULL;
}

static int is_of_type(PyObject *object, PyObject *types)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(types); i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(types, i))
            return 1;
    return 0;
}

/* Whether a tensor's elements lie side by side, in any order of its axes. */
static int is_dense(const DLTensor *tensor)
{
    if (tensor->strides == NULL)
        return 1;
    int64_t next = 1; /* the stride of the axis that is to come next */
    for (int found = 0, seen = 0; seen < tensor->ndim; seen += found, found = 0) {
        for (int i = tensor->ndim - 1; i >= 0; i--)
            if (tensor->shape[i] != 1 && tensor->strides[i] == next) {
                next *= tensor->shape[i];
                found++;
            }
        if (!found)
            break;
    }
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count == 0 || next == count;
}

/* The letter of a type of floats by its code and bits, see _native.pyi; 0 of any other. */
static int dtype_of(int code, int bits)
{
    switch (code << 8 | bits) {
    case 2 << 8 | 32: return 'f';
    case 2 << 8 | 64: return 'd';
    case 2 << 8 | 16: return 'e';
    case 4 << 8 | 16: return 'E';
    case 10 << 8 | 8: return '4'; /* float8_e4m3fn */
    case 12 << 8 | 8: return '5'; /* float8_e5m2 */
    default: return 0;
    }
}

/* Describe a dense tensor of floats, and where the units of one of its axes lie; 0 if it is anything
 * else or has no such axis. */
static int describe(PyObject *object, const Exchange *exchange, PyObject *axis, Values *found)
{
    DLTensor tensor;
    if (exchange->describe(object, &tensor)) {
        PyErr_Clear();
        return 0;
    }
    found->dtype = dtype_of(tensor.dtype.code, tensor.dtype.bits);
    found->values = tensor.data + tensor.byte_offset;
    found->device_type = tensor.device.type;
    found->device = tensor.device.id;
    found->count = 1;
    for (int i = 0; i < tensor.ndim; i++)
        found->count *= tensor.shape[i];
    found->units = 0;
    found->inner = 1;
    if (!found->dtype || tensor.dtype.lanes != 1 || (!tensor.data && found->count) ||
        !is_dense(&tensor))
        return 0;
    if (axis == Py_None)
        return 1;
    long at = PyLong_AsLong(axis);
    at += at < 0 ? tensor.ndim : 0;
    if (PyErr_Occurred() || at < 0 || at >= tensor.ndim) {
        PyErr_Clear();
        return 0;
    }
    found->units = tensor.shape[at];
    if (found->units == 1) /* whose stride says nothing */
        found->inner = found->count;
    else if (tensor.strides != NULL)
        found->inner = tensor.strides[at];
    else
        for (int i = (int)at + 1; i < tensor.ndim; i++)
            found->inner *= tensor.shape[i];
    return 1;
}

#endif

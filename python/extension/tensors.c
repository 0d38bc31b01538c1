/* Reads a tensor in one call, where PyTorch (2.10 and later) offers the C functions of DLPack's
 * exchange table; asking for its attributes one by one takes a microsecond. Declared here is what
 * the interface fixes for its major version 1. */
#include "extension.h"

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t kind, ordinal;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements; no strides: contiguous */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_exchange {
    uint32_t major, minor;
    const struct dl_exchange *older;
    void (*allocate)(void), (*take)(void), (*give)(void);
    int (*look)(void *object, dl_tensor *out); /* may be NULL; the tensor stays its owner's */
} dl_exchange;

enum {
    DL_CPU = 1,
    DL_CUDA = 2,
    DL_FLOAT = 2,
    DL_BFLOAT = 4
};

int ext_tensors_open(ext_tensors *tensors, PyObject *type) {
    Py_CLEAR(tensors->type);
    tensors->look = NULL;
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const dl_exchange *table =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (table && table->major > 1) table = table->older;
    /* PyTorch's table is static: it outlives its capsule. */
    if (table && table->major == 1 && table->look) {
        tensors->type = Py_NewRef(type);
        tensors->look = table->look;
    }
    Py_XDECREF(capsule);
    return tensors->look != NULL;
}

void ext_tensors_close(ext_tensors *tensors) {
    Py_CLEAR(tensors->type);
}

static onehop_dtype dtype_of(const dl_tensor *t) {
    if (t->dtype.lanes != 1) return (onehop_dtype)0;
    if (t->dtype.code == DL_BFLOAT && t->dtype.bits == 16) return ONEHOP_BFLOAT16;
    if (t->dtype.code != DL_FLOAT) return (onehop_dtype)0;
    return t->dtype.bits == 32   ? ONEHOP_FLOAT32
           : t->dtype.bits == 16 ? ONEHOP_FLOAT16
                                 : (onehop_dtype)0;
}

/* Number of elements, SIZE_MAX unless they lie one behind the other. */
static size_t dense_count(const dl_tensor *t) {
    int64_t count = 1;
    for (int32_t i = t->dimensions - 1; i >= 0; i--) {
        if (t->strides && t->shape[i] != 1 && t->strides[i] != count && t->shape[i])
            return SIZE_MAX;
        count *= t->shape[i];
    }
    return (size_t)count;
}

int ext_tensors_read(const ext_tensors *tensors, PyObject *in, PyObject *out, ext_call *call_out) {
    dl_tensor a, b;
    if (!tensors->look || (PyObject *)Py_TYPE(in) != tensors->type ||
        (PyObject *)Py_TYPE(out) != tensors->type)
        return 0;
    if (tensors->look(in, &a) || tensors->look(out, &b)) {
        PyErr_Clear();
        return 0;
    }
    call_out->dtype = dtype_of(&a);
    call_out->count = dense_count(&a);
    call_out->in = (char *)a.data + a.byte_offset;
    call_out->out = (char *)b.data + b.byte_offset;
    if (a.dimensions != b.dimensions) return 0;
    for (int32_t i = 0; i < a.dimensions; i++)
        if (a.shape[i] != b.shape[i]) return 0;
    return call_out->dtype && call_out->count != SIZE_MAX && dtype_of(&b) == call_out->dtype &&
           dense_count(&b) == call_out->count && a.device.kind == tensors->kind &&
           a.device.ordinal == tensors->ordinal && b.device.kind == tensors->kind &&
           b.device.ordinal == tensors->ordinal;
}

void ext_tensors_place(ext_tensors *tensors, onehop_device device) {
    tensors->kind = device.kind == ONEHOP_DEVICE_HOST ? DL_CPU : DL_CUDA;
    tensors->ordinal = device.kind == ONEHOP_DEVICE_HOST ? 0 : device.ordinal;
}

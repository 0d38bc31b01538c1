/* Arguments of the fused operations. Addresses, 0 for none, are parsed as 64 bits. */
#include "extension.h"

#include <string.h>

static void *at(unsigned long long address) {
    return (void *)(uintptr_t)address;
}

int ext_parse_norm(PyObject *args, onehop_norm *norm_out, onehop_stream *stream_out) {
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    unsigned long long x, residual_in, weight, normed, residual_out, quantised, row_scales, stream;
    Py_ssize_t rows, hidden, x_stride, residual_in_stride;
    int dtype;
    if (!PyArg_ParseTuple(args, "KKKKKKKnnnniIffK", &x, &residual_in, &weight, &normed,
                          &residual_out, &quantised, &row_scales, &rows, &hidden, &x_stride,
                          &residual_in_stride, &dtype, &n.flags, &n.eps, &n.scale, &stream))
        return -1;
    n.x = at(x);
    n.residual_in = at(residual_in);
    n.weight = at(weight);
    n.normed = at(normed);
    n.residual_out = at(residual_out);
    n.quantised = at(quantised);
    n.row_scales = at(row_scales);
    n.rows = (size_t)rows;
    n.hidden = (size_t)hidden;
    n.x_stride = (size_t)x_stride;
    n.residual_in_stride = (size_t)residual_in_stride;
    n.dtype = (onehop_dtype)dtype;
    *norm_out = n;
    *stream_out = at(stream);
    return 0;
}

int ext_parse_qknorm(PyObject *args, onehop_qknorm *qknorm_out, onehop_stream *stream_out) {
    onehop_qknorm n = ONEHOP_CONFIG_INIT(onehop_qknorm);
    unsigned long long q, k, q_weight, k_weight, stream;
    Py_ssize_t tokens, q_width, k_width, q_stride, k_stride;
    int dtype;
    if (!PyArg_ParseTuple(args, "KKKKnnnnniIfK", &q, &k, &q_weight, &k_weight, &tokens, &q_width,
                          &k_width, &q_stride, &k_stride, &dtype, &n.flags, &n.eps, &stream))
        return -1;
    n.q = at(q);
    n.k = at(k);
    n.q_weight = at(q_weight);
    n.k_weight = at(k_weight);
    n.tokens = (size_t)tokens;
    n.q_width = (size_t)q_width;
    n.k_width = (size_t)k_width;
    n.q_stride = (size_t)q_stride;
    n.k_stride = (size_t)k_stride;
    n.dtype = (onehop_dtype)dtype;
    *qknorm_out = n;
    *stream_out = at(stream);
    return 0;
}

/* ---- expressions ----------------------------------------------------------------------------- */

static const char op_capsule[] = "onehop_expression";

static void op_capsule_end(PyObject *capsule) {
    onehop_expression_destroy(PyCapsule_GetPointer(capsule, op_capsule));
}

PyObject *ext_op_capsule(onehop_expression *op) {
    PyObject *capsule = PyCapsule_New(op, op_capsule, op_capsule_end);
    if (!capsule) onehop_expression_destroy(op);
    return capsule;
}

/* The number of what a tuple has for the names of an expression, or -1. */
static Py_ssize_t count_of(PyObject *tuple, const char *what) {
    const Py_ssize_t count = PyTuple_Size(tuple);
    if (count <= ONEHOP_OP_NAMES) return count;
    PyErr_Format(PyExc_ValueError, "%s: expected at most %d, found %zd", what, ONEHOP_OP_NAMES,
                 count);
    return -1;
}

static int read_names(PyObject *tuple, const char *what, const char **out) {
    const Py_ssize_t count = count_of(tuple, what);
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length;
        out[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, i), &length);
        if (!out[i]) return -1;
        if (strlen(out[i]) == (size_t)length) continue;
        PyErr_Format(PyExc_ValueError, "%s: a name has a character 0", what);
        return -1;
    }
    return count < 0 ? -1 : 0;
}

int ext_parse_op_config(PyObject *args, onehop_expression_config *config_out) {
    onehop_expression_config c = ONEHOP_CONFIG_INIT(onehop_expression_config);
    PyObject *scalars, *arrays, *dtypes;
    Py_ssize_t row_length;
    int dtype;
    if (!PyArg_ParseTuple(args, "sinO!O!O!", &c.expression, &dtype, &row_length, &PyTuple_Type,
                          &scalars, &PyTuple_Type, &arrays, &PyTuple_Type, &dtypes) ||
        read_names(scalars, "scalars", c.scalars) || read_names(arrays, "arrays", c.arrays) ||
        ext_check_count("op_create: array_dtypes", PyTuple_Size(dtypes), PyTuple_Size(arrays)))
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(dtypes); i++)
        c.array_dtypes[i] = (onehop_dtype)PyLong_AsLong(PyTuple_GetItem(dtypes, i));
    c.dtype = (onehop_dtype)dtype;
    c.row_length = (size_t)row_length;
    *config_out = c;
    return PyErr_Occurred() ? -1 : 0;
}

int ext_parse_op_call(PyObject *args, ext_op_call *call_out) {
    ext_op_call c = {.values = ONEHOP_CONFIG_INIT(onehop_expression_values),
                     .way = ONEHOP_CONFIG_INIT(onehop_call)};
    PyObject *capsule, *scalars, *arrays;
    unsigned long long in, out, stream;
    Py_ssize_t count;
    int algorithm, source;
    if (!PyArg_ParseTuple(args, "OKKnO!O!iiIIK", &capsule, &in, &out, &count, &PyTuple_Type,
                          &scalars, &PyTuple_Type, &arrays, &algorithm, &source, &c.way.blocks,
                          &c.way.threads, &stream))
        return -1;
    const Py_ssize_t numbers = count_of(scalars, "scalars"), places = count_of(arrays, "arrays");
    c.op = PyCapsule_GetPointer(capsule, op_capsule);
    for (Py_ssize_t i = 0; i < numbers; i++)
        c.values.scalars[i] = (float)PyFloat_AsDouble(PyTuple_GetItem(scalars, i));
    for (Py_ssize_t i = 0; i < places; i++)
        c.values.arrays[i] = PyLong_AsVoidPtr(PyTuple_GetItem(arrays, i));
    c.in = at(in);
    c.out = at(out);
    c.count = (size_t)count;
    c.way.algorithm = (onehop_algorithm)algorithm;
    c.way.source = (onehop_source)source;
    c.stream = at(stream);
    *call_out = c;
    return PyErr_Occurred() ? -1 : 0;
}

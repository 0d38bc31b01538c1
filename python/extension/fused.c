/* Arguments of the fused operations. Addresses, 0 for none, are parsed as 64 bits. */
#include "extension.h"

static void *at(unsigned long long address) {
    return (void *)(uintptr_t)address;
}

int ext_parse_norm(PyObject *args, onehop_norm *norm_out, onehop_stream_t *stream_out) {
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

int ext_parse_qknorm(PyObject *args, onehop_qknorm *qknorm_out, onehop_stream_t *stream_out) {
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

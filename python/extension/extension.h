/* What the files of the extension module share. It is thin: objects that hold the library's
 * handles, calls that convert arguments, release the GIL where a call may wait, and raise what
 * failed. The stable ABI of Python 3.10, so one build serves all later versions. Addresses are
 * Python ints. */
#ifndef ONEHOP_EXTENSION_H
#define ONEHOP_EXTENSION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <onehop.h>
#include <sys/types.h>

/* The library may be used by one thread at a time for each object; the GIL, released while a call
 * waits, does not see to that. */
typedef struct ext_guard {
    pid_t owner; /* the process that made the object: threads inside it are there */
    int busy;    /* a call that no other may run beside */
    int beside;  /* calls that may run beside any other but the end */
} ext_guard;

/* A call of the library without the GIL. While it waits, handlers of Python's signals run; what one
 * of them raises ends the wait. */
typedef struct ext_wait {
    PyThreadState *thread;
    struct ext_wait *outer; /* a handler may make calls too */
    PyObject *type, *error, *trace;
} ext_wait;
void ext_wait_begin(ext_wait *wait);
/* -1, with the exception set, if a handler has raised one. */
int ext_wait_end(ext_wait *wait);

/* result = call, without the GIL. If a handler has raised, `result` is INTERRUPTED and ext_raise
 * leaves that exception as it is. */
#define EXT_WAITING(result, call)                                                                  \
    do {                                                                                           \
        ext_wait wait_;                                                                            \
        ext_wait_begin(&wait_);                                                                    \
        (result) = (call);                                                                         \
        if (ext_wait_end(&wait_)) (result) = ONEHOP_ERR_INTERRUPTED;                               \
    } while (0)

/* Raises onehop.Error or the subclass for `result`, with what the library said last on this thread.
 * Returns NULL. */
PyObject *ext_raise(onehop_result result);
/* The same with another sentence and a record, which may be NULL. */
PyObject *ext_raise_with(onehop_result result, const char *text, const onehop_failure *failure);
/* Raises unless this thread may make a call on a live object of this process; 0 if it may. */
int ext_enter(const ext_guard *guard, const void *handle, const char *what);

/* (result, rank, peer, sequence number, site, expected, seen, text) */
PyObject *ext_failure(const onehop_failure *failure);

/* Arguments of the hot calls, args[0..4]: in, out, count, dtype, stream. */
typedef struct ext_call {
    void *in, *out;
    size_t count;
    onehop_dtype dtype;
    onehop_stream stream;
} ext_call;
int ext_parse_call(PyObject *const *args, ext_call *call_out);
/* args[0..]: algorithm, source, blocks, threads. */
int ext_parse_way(PyObject *const *args, onehop_call *call_out);
/* Arguments of the fused operations, in the order of the stub; the stream is the last of them. */
int ext_parse_norm(PyObject *args, onehop_norm *norm_out, onehop_stream *stream_out);
int ext_parse_qknorm(PyObject *args, onehop_qknorm *qknorm_out, onehop_stream *stream_out);
/* The texts of *config_out are those of the arguments. */
int ext_parse_op_config(PyObject *args, onehop_expression_config *config_out);
/* What the caller of op_create holds; takes op over. */
PyObject *ext_op_capsule(onehop_expression *op);
typedef struct ext_op_call {
    onehop_expression *op;
    void *in, *out;
    size_t count;
    onehop_expression_values values;
    onehop_call way;
    onehop_stream stream;
} ext_op_call;
int ext_parse_op_call(PyObject *args, ext_op_call *call_out);
/* Raises TypeError and returns -1 unless `found` is `expected`. */
int ext_check_count(const char *name, Py_ssize_t found, Py_ssize_t expected);

struct dl_tensor;

/* Tensors read directly, if their type allows it. */
typedef struct ext_tensors {
    PyObject *type; /* of the tensors that are read; no subclass */
    int (*look)(void *object, struct dl_tensor *out);
    int32_t kind, ordinal; /* of the device where they must lie */
} ext_tensors;
void ext_tensors_place(ext_tensors *tensors, onehop_device device);
/* 1 if tensors of this type can be read. */
int ext_tensors_open(ext_tensors *tensors, PyObject *type);
void ext_tensors_close(ext_tensors *tensors);
/* 1 and all but the stream of *call_out, if both are contiguous, on the device, of the same type
 * and shape; else 0, and no exception. */
int ext_tensors_read(const ext_tensors *tensors, PyObject *in, PyObject *out, ext_call *call_out);

/* A sequence of `count` ints into `out`, which is allocated; NULL and an exception on error. */
void **ext_addresses(PyObject *sequence, size_t count, const char *what);

PyObject *ext_context_type(void);
PyObject *ext_communicator_type(void);
PyObject *ext_host_stream_type(void);
PyObject *ext_host_graph_type(void);

/* layout(device_kind, world_size, ...), storage_arm(...): see _onehop.pyi. */
PyObject *ext_layout(PyObject *module, PyObject *args);
PyObject *ext_storage_arm(PyObject *module, PyObject *args);

#endif

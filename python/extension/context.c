/* Context: an onehop_context, and the group it was set up through if that is a callback of the
 * caller's. */
#include "extension.h"

#include <string.h>
#include <unistd.h>

typedef struct Context {
    PyObject_HEAD onehop_context *context;
    onehop_group *group;
    PyObject *allgather;
    PyObject *raised; /* by the callback */
    int world_size;   /* that of the callback */
    int host;
    ext_tensors tensors;
    ext_guard guard;
} Context;

static int enter(Context *self) {
    return ext_enter(&self->guard, self->context, "onehop context");
}

/* ---- failures -------------------------------------------------------------------------------- */

/* What the callback raised is the cause of the error that is being raised now. But what ends a
 * program, such as KeyboardInterrupt, is raised itself. */
static void name_cause(Context *self) {
    PyObject *type, *error, *trace;
    if (!self->raised) return;
    if (PyObject_IsInstance(self->raised, PyExc_Exception) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(self->raised), self->raised);
        Py_CLEAR(self->raised);
        return;
    }
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error) PyException_SetCause(error, self->raised); /* takes the reference */
    self->raised = NULL;
    PyErr_Restore(type, error, trace);
}

/* Right after the call that failed, on its thread, which has the sentence. */
static PyObject *fail(Context *self, onehop_result result) {
    if (PyErr_Occurred()) { /* a signal's handler has raised it */
        Py_CLEAR(self->raised);
        return NULL;
    }
    if (result > -300 || result <= -400 || !self->context) {
        ext_raise(result);
    } else {
        char sentence[512] = "";
        onehop_failure failure;
        memset(&failure, 0, sizeof failure);
        strncpy(sentence, onehop_last_error(), sizeof sentence - 1); /* status may replace it */
        (void)onehop_status(self->context, &failure);
        ext_raise_with(result, sentence, &failure);
    }
    name_cause(self);
    return NULL;
}

static PyObject *none_or_fail(Context *self, onehop_result result) {
    return result ? fail(self, result) : Py_NewRef(Py_None);
}

/* result = call, alone on the object. */
#define WAITING(self, result, call)                                                                \
    do {                                                                                           \
        (self)->guard.busy = 1;                                                                    \
        EXT_WAITING(result, call);                                                                 \
        (self)->guard.busy = 0;                                                                    \
    } while (0)

/* A launch keeps the GIL; a call on the host runs to its end. */
#define CALLING(self, result, call)                                                                \
    do {                                                                                           \
        if ((self)->host)                                                                          \
            WAITING(self, result, call);                                                           \
        else                                                                                       \
            (result) = (call);                                                                     \
    } while (0)

/* Runs without the GIL, beside whatever another thread does with the object but its end. */
#define BESIDE(self, expression)                                                                   \
    do {                                                                                           \
        (self)->guard.beside++;                                                                    \
        Py_BEGIN_ALLOW_THREADS;                                                                    \
        expression;                                                                                \
        Py_END_ALLOW_THREADS;                                                                      \
        (self)->guard.beside--;                                                                    \
    } while (0)

/* ---- begin and end --------------------------------------------------------------------------- */

/* `bytes` of every rank, by the caller's function: bytes -> bytes of all ranks. */
static int gather(Context *self, const void *send, void *recv, size_t bytes) {
    char *found;
    Py_ssize_t length;
    const size_t expected = bytes * (size_t)self->world_size;
    PyObject *got =
        PyObject_CallFunction(self->allgather, "y#", (const char *)send, (Py_ssize_t)bytes);
    if (!got) return -1;
    int failed = PyBytes_AsStringAndSize(got, &found, &length);
    if (!failed && (size_t)length != expected) {
        PyErr_Format(PyExc_ValueError,
                     "all-gather of %zu bytes among %d ranks: expected %zu bytes, found %zd", bytes,
                     self->world_size, expected, length);
        failed = -1;
    }
    if (!failed) memcpy(recv, found, expected);
    Py_DECREF(got);
    return failed;
}

/* The library calls it inside calls that have released the GIL. */
static int gather_callback(void *user, const void *send, void *recv, size_t bytes) {
    Context *self = user;
    PyObject *type, *error, *trace;
    const PyGILState_STATE state = PyGILState_Ensure();
    const int failed = gather(self, send, recv, bytes);
    if (failed) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        if (trace) PyException_SetTraceback(error, trace);
        Py_XDECREF(type);
        Py_XDECREF(trace);
        Py_XDECREF(self->raised);
        self->raised = error;
    }
    PyGILState_Release(state);
    return failed;
}

static onehop_result open_group(Context *self, const onehop_config *config) {
    onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    g.rank = config->rank;
    g.world_size = config->world_size;
    g.allgather = gather_callback;
    g.user = self;
    g.timeout_ms = config->init_timeout_ms;
    return onehop_group_open(&g, &self->group);
}

static onehop_result create(Context *self, onehop_config *config) {
    if (self->allgather) {
        const onehop_result result = open_group(self, config);
        if (result) return result;
        config->group = self->group;
        config->rank = config->world_size = 0;
    }
    const onehop_result result = onehop_create(config, &self->context);
    if (result && self->group) {
        onehop_group_close(self->group);
        self->group = NULL;
    }
    return result;
}

static int parse_config(PyObject *args, PyObject *kwargs, onehop_config *c, PyObject **allgather) {
    static char *names[] = {"rank",
                            "world_size",
                            "name",
                            "allgather",
                            "device",
                            "ordinal",
                            "max_bytes",
                            "push_bytes",
                            "pull_bytes",
                            "max_blocks",
                            "max_registrations",
                            "timeout_ms",
                            "flags",
                            "init_timeout_ms",
                            NULL};
    int kind = ONEHOP_DEVICE_AUTO;
    Py_ssize_t max_bytes = 0, push_bytes = 0, pull_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "|iizO$iinnnIIIII", names, &c->rank, &c->world_size, &c->name, allgather,
            &kind, &c->device.ordinal, &max_bytes, &push_bytes, &pull_bytes, &c->max_blocks,
            &c->max_registrations, &c->timeout_ms, &c->flags, &c->init_timeout_ms))
        return -1;
    c->device.kind = (onehop_device_kind)kind;
    c->max_bytes = (size_t)max_bytes;
    c->push_bytes = (size_t)push_bytes;
    c->pull_bytes = (size_t)pull_bytes;
    if (*allgather == Py_None) *allgather = NULL;
    return 0;
}

static int context_init(Context *self, PyObject *args, PyObject *kwargs) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    PyObject *allgather = NULL;
    onehop_result result;
    if (parse_config(args, kwargs, &config, &allgather)) return -1;
    if (self->context || self->guard.busy) {
        PyErr_SetString(PyExc_TypeError, "the context is made already");
        return -1;
    }
    self->guard.owner = getpid();
    self->world_size = config.world_size;
    Py_XDECREF(self->allgather);
    self->allgather = allgather ? Py_NewRef(allgather) : NULL;
    WAITING(self, result, create(self, &config));
    if (result) {
        fail(self, result);
        return -1;
    }
    Py_CLEAR(self->raised);
    self->host = onehop_get_device(self->context).kind == ONEHOP_DEVICE_HOST;
    ext_tensors_place(&self->tensors, onehop_get_device(self->context));
    return 0;
}

/* Waits for this rank's own calls at most. -1: a signal's handler has raised, which has ended
 * those. */
static int end(Context *self) {
    onehop_context *context = self->context;
    onehop_group *group = self->group;
    ext_wait wait;
    self->context = NULL;
    self->group = NULL;
    ext_wait_begin(&wait);
    onehop_destroy(context);
    onehop_group_close(group);
    return ext_wait_end(&wait);
}

static PyObject *context_destroy(Context *self, PyObject *unused) {
    (void)unused;
    /* Who was inside when this process was forked is not here. */
    if (self->guard.owner == getpid() && (self->guard.busy || self->guard.beside))
        return ext_raise_with(ONEHOP_ERR_STATE,
                              "onehop context: another thread is inside a call on it; abort() ends "
                              "that, then destroy",
                              NULL);
    if (self->context && end(self)) return NULL;
    Py_RETURN_NONE;
}

/* Where nothing can be raised: what a handler raises is printed, what is being raised stays. */
static void end_unseen(Context *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (end(self)) PyErr_WriteUnraisable((PyObject *)Py_TYPE(self));
    PyErr_Restore(type, error, trace);
}

static void context_dealloc(Context *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->context) end_unseen(self);
    Py_XDECREF(self->allgather);
    Py_XDECREF(self->raised);
    ext_tensors_close(&self->tensors);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static onehop_result run(Context *self, const ext_call *c) {
    onehop_result result;
    if (!self->host) /* launched, not waited for */
        return onehop_all_reduce(self->context, c->in, c->out, c->count, c->dtype, ONEHOP_SUM, NULL,
                                 c->stream);
    WAITING(self, result,
            onehop_all_reduce(self->context, c->in, c->out, c->count, c->dtype, ONEHOP_SUM, NULL,
                              c->stream));
    return result;
}

static PyObject *context_all_reduce(Context *self, PyObject *const *args, Py_ssize_t count) {
    ext_call c;
    if (ext_check_count("all_reduce", count, 5) || ext_parse_call(args, &c) || enter(self))
        return NULL;
    return none_or_fail(self, run(self, &c));
}

static PyObject *context_read_tensors(Context *self, PyObject *type) {
    return PyBool_FromLong(ext_tensors_open(&self->tensors, type));
}

/* (in, out, stream): False, and nothing done, if the tensors are not the common kind. */
static PyObject *context_all_reduce_tensors(Context *self, PyObject *const *args,
                                            Py_ssize_t count) {
    ext_call c;
    if (ext_check_count("all_reduce_tensors", count, 3) || enter(self)) return NULL;
    c.stream = PyLong_AsVoidPtr(args[2]);
    if (!c.stream && PyErr_Occurred()) return NULL;
    if (!ext_tensors_read(&self->tensors, args[0], args[1], &c)) Py_RETURN_FALSE;
    const onehop_result result = run(self, &c);
    return result ? fail(self, result) : Py_NewRef(Py_True);
}

static PyObject *context_all_reduce_with(Context *self, PyObject *const *args, Py_ssize_t count) {
    ext_call c;
    onehop_call way;
    onehop_result result;
    if (ext_check_count("all_reduce_with", count, 11) || ext_parse_call(args, &c) ||
        ext_parse_way(args + 5, &way) || enter(self))
        return NULL;
    CALLING(self, result,
            onehop_all_reduce(self->context, c.in, c.out, c.count, c.dtype, ONEHOP_SUM, &way,
                              c.stream));
    return none_or_fail(self, result);
}

static PyObject *context_reduce_scatter(Context *self, PyObject *const *args, Py_ssize_t count) {
    ext_call c;
    onehop_result result;
    if (ext_check_count("reduce_scatter", count, 5) || ext_parse_call(args, &c) || enter(self))
        return NULL;
    CALLING(self, result,
            onehop_reduce_scatter(self->context, c.in, c.out, c.count, c.dtype, ONEHOP_SUM, NULL,
                                  c.stream));
    return none_or_fail(self, result);
}

static PyObject *context_all_gather(Context *self, PyObject *const *args, Py_ssize_t count) {
    onehop_result result;
    if (ext_check_count("all_gather", count, 4)) return NULL;
    void *in = PyLong_AsVoidPtr(args[0]), *out = PyLong_AsVoidPtr(args[1]);
    const size_t bytes = PyLong_AsSize_t(args[2]);
    void *stream = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred() || enter(self)) return NULL;
    CALLING(self, result, onehop_all_gather(self->context, in, out, bytes, NULL, stream));
    return none_or_fail(self, result);
}

static PyObject *context_all_reduce_norm(Context *self, PyObject *args) {
    onehop_norm norm;
    onehop_stream stream;
    onehop_result result;
    if (ext_parse_norm(args, &norm, &stream) || enter(self)) return NULL;
    CALLING(self, result, onehop_all_reduce_norm(self->context, &norm, NULL, stream));
    return none_or_fail(self, result);
}

static PyObject *context_tp_qknorm(Context *self, PyObject *args) {
    onehop_qknorm qknorm;
    onehop_stream stream;
    onehop_result result;
    if (ext_parse_qknorm(args, &qknorm, &stream) || enter(self)) return NULL;
    CALLING(self, result, onehop_tp_qknorm(self->context, &qknorm, NULL, stream));
    return none_or_fail(self, result);
}

static PyObject *context_tp_qknorm_max_blocks(Context *self, PyObject *args) {
    onehop_qknorm qknorm = ONEHOP_CONFIG_INIT(onehop_qknorm);
    Py_ssize_t q_width, k_width;
    int dtype;
    uint32_t blocks;
    if (!PyArg_ParseTuple(args, "nni", &q_width, &k_width, &dtype) || enter(self)) return NULL;
    qknorm.q_width = (size_t)q_width;
    qknorm.k_width = (size_t)k_width;
    qknorm.dtype = (onehop_dtype)dtype;
    const onehop_result result = onehop_tp_qknorm_max_blocks(self->context, &qknorm, &blocks);
    return result ? fail(self, result) : PyLong_FromUnsignedLong(blocks);
}

/* Collective. */
static PyObject *context_prepare(Context *self, PyObject *args) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    onehop_result result;
    if (!PyArg_ParseTuple(args, "II", &config.dtypes, &config.flags) || enter(self)) return NULL;
    WAITING(self, result, onehop_prepare(self->context, &config));
    return none_or_fail(self, result);
}

/* Collective. */
static PyObject *context_op_create(Context *self, PyObject *args) {
    onehop_expression_config config;
    onehop_expression *op = NULL;
    onehop_result result;
    if (ext_parse_op_config(args, &config) || enter(self)) return NULL;
    WAITING(self, result, onehop_expression_create(self->context, &config, &op));
    if (!result) return ext_op_capsule(op);
    onehop_expression_destroy(op); /* made, but a handler has raised */
    return fail(self, result);
}

static PyObject *context_all_reduce_op(Context *self, PyObject *args) {
    ext_op_call c;
    onehop_result result;
    if (ext_parse_op_call(args, &c) || enter(self)) return NULL;
    CALLING(self, result,
            onehop_all_reduce_expression(self->context, c.in, c.out, c.count, c.op, &c.values,
                                         &c.way, c.stream));
    return none_or_fail(self, result);
}

static PyObject *context_synchronize(Context *self, PyObject *stream) {
    void *handle = PyLong_AsVoidPtr(stream);
    onehop_result result;
    if (PyErr_Occurred() || enter(self)) return NULL;
    WAITING(self, result, onehop_synchronize(self->context, handle));
    return none_or_fail(self, result);
}

static PyObject *choice_tuple(const onehop_choice *choice) {
    return Py_BuildValue("(iiIIIzIi)", (int)choice->algorithm, (int)choice->source, choice->blocks,
                         choice->threads, choice->chunks, choice->table, choice->line,
                         (int)choice->instead_of);
}

static PyObject *context_would_use(Context *self, PyObject *args) {
    Py_ssize_t bytes;
    int collective, dtype, mode, in_place, algorithm = 0, source = 0;
    onehop_choice choice;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_query query = ONEHOP_CONFIG_INIT(onehop_query);
    if (!PyArg_ParseTuple(args, "niiii|ii", &bytes, &collective, &dtype, &mode, &in_place,
                          &algorithm, &source) ||
        enter(self))
        return NULL;
    call.algorithm = (onehop_algorithm)algorithm;
    call.source = (onehop_source)source;
    query.bytes = (size_t)bytes;
    query.collective = (onehop_collective)collective;
    query.dtype = (onehop_dtype)dtype;
    query.mode = (onehop_mode)mode;
    query.in_place = in_place;
    query.call = &call;
    const onehop_result result = onehop_would_use(self->context, &query, &choice);
    return result ? fail(self, result) : choice_tuple(&choice);
}

/* ---- capture --------------------------------------------------------------------------------- */

static PyObject *context_capture_begin(Context *self, PyObject *unused) {
    (void)unused;
    onehop_result result;
    if (enter(self)) return NULL;
    WAITING(self, result, onehop_capture_begin(self->context));
    return none_or_fail(self, result);
}

static PyObject *context_capture_end(Context *self, PyObject *unused) {
    (void)unused;
    onehop_result result;
    if (enter(self)) return NULL;
    WAITING(self, result, onehop_capture_end(self->context));
    return none_or_fail(self, result);
}

static PyObject *list_inputs(const onehop_captured_input *inputs, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *row =
            Py_BuildValue("(NNn)", PyLong_FromVoidPtr((void *)inputs[i].in),
                          PyLong_FromVoidPtr(inputs[i].out), (Py_ssize_t)inputs[i].bytes);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *context_capture_inputs(Context *self, PyObject *unused) {
    (void)unused;
    size_t count = 0;
    if (enter(self)) return NULL;
    onehop_result result = onehop_capture_inputs(self->context, NULL, 0, &count);
    if (result) return fail(self, result);
    onehop_captured_input *inputs = PyMem_Calloc(count + 1, sizeof *inputs);
    if (!inputs) return PyErr_NoMemory();
    result = onehop_capture_inputs(self->context, inputs, count, &count);
    PyObject *list = result ? fail(self, result) : list_inputs(inputs, count);
    PyMem_Free(inputs);
    return list;
}

/* (in, out, count): count * world_size addresses each, [call][rank]. */
static PyObject *context_capture_end_mapped(Context *self, PyObject *args) {
    PyObject *in, *out;
    Py_ssize_t count;
    onehop_result result = ONEHOP_OK;
    if (!PyArg_ParseTuple(args, "OOn", &in, &out, &count) || enter(self)) return NULL;
    if (count < 0) return PyErr_SetString(PyExc_ValueError, "count is negative"), NULL;
    const size_t total = (size_t)count * (size_t)onehop_world_size(self->context);
    void **ins = ext_addresses(in, total, "in"), **outs = NULL;
    if (ins) outs = ext_addresses(out, total, "out");
    if (outs)
        WAITING(self, result,
                onehop_capture_end_mapped(self->context, (const void *const *)ins, outs,
                                          (size_t)count));
    const int parsed = outs != NULL;
    PyMem_Free(ins);
    PyMem_Free(outs);
    return parsed ? none_or_fail(self, result) : NULL;
}

/* ---- beside other calls ---------------------------------------------------------------------- */

static int enter_beside(Context *self) {
    const ext_guard idle = {self->guard.owner, 0, 0};
    return ext_enter(&idle, self->context, "onehop context");
}

/* None, or the record of what killed it. */
static PyObject *context_status(Context *self, PyObject *unused) {
    (void)unused;
    onehop_failure failure;
    onehop_result result;
    memset(&failure, 0, sizeof failure);
    if (enter_beside(self)) return NULL;
    BESIDE(self, result = onehop_status(self->context, &failure));
    if (!result) Py_RETURN_NONE;
    if (result > -300 || result <= -400) return ext_raise(result);
    return ext_failure(&failure);
}

static PyObject *context_abort(Context *self, PyObject *unused) {
    (void)unused;
    onehop_result result;
    if (enter_beside(self)) return NULL;
    BESIDE(self, result = onehop_abort(self->context));
    return result ? ext_raise(result) : Py_NewRef(Py_None);
}

static PyObject *context_set_timeout(Context *self, PyObject *milliseconds) {
    const unsigned long timeout_ms = PyLong_AsUnsignedLong(milliseconds);
    onehop_result result;
    if (PyErr_Occurred() || enter_beside(self)) return NULL;
    if (timeout_ms > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the timeout does not fit 32 bits");
        return NULL;
    }
    BESIDE(self, result = onehop_set_timeout(self->context, (uint32_t)timeout_ms));
    return result ? ext_raise(result) : Py_NewRef(Py_None);
}

/* ---- what it is ------------------------------------------------------------------------------ */

/* (calls, bytes, calls_by, symmetric_bytes, local_bytes, host_bytes, registrations_used,
 * registrations_total, push_bytes, pull_bytes, registrations_direct, registrations_staged) */
static PyObject *context_stats(Context *self, PyObject *unused) {
    (void)unused;
    onehop_stats s;
    if (enter(self)) return NULL;
    const onehop_result result = onehop_get_stats(self->context, &s);
    if (result) return fail(self, result);
    const size_t kinds = sizeof s.calls_by / sizeof *s.calls_by;
    PyObject *calls_by = PyTuple_New((Py_ssize_t)kinds);
    for (size_t i = 0; calls_by && i < kinds; i++) {
        PyObject *calls = PyLong_FromUnsignedLongLong(s.calls_by[i]);
        if (!calls || PyTuple_SetItem(calls_by, (Py_ssize_t)i, calls)) Py_CLEAR(calls_by);
    }
    if (!calls_by) return NULL;
    typedef unsigned long long number;
    return Py_BuildValue("(KKNKKKIIKKKK)", (number)s.calls, (number)s.bytes, calls_by,
                         (number)s.symmetric_bytes, (number)s.local_bytes, (number)s.host_bytes,
                         s.registrations_used, s.registrations_total, (number)s.push_bytes,
                         (number)s.pull_bytes, (number)s.registrations_direct,
                         (number)s.registrations_staged);
}

static PyObject *get_rank(Context *self, void *unused) {
    (void)unused;
    return enter_beside(self) ? NULL : PyLong_FromLong(onehop_rank(self->context));
}

static PyObject *get_world_size(Context *self, void *unused) {
    (void)unused;
    return enter_beside(self) ? NULL : PyLong_FromLong(onehop_world_size(self->context));
}

static PyObject *get_device(Context *self, void *unused) {
    (void)unused;
    if (enter_beside(self)) return NULL;
    const onehop_device device = onehop_get_device(self->context);
    return Py_BuildValue("(ii)", (int)device.kind, device.ordinal);
}

static PyObject *get_closed(Context *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(!self->context);
}

/* ---- the type -------------------------------------------------------------------------------- */

#define METHOD(name, flags, text) {#name, (PyCFunction)(void (*)(void))context_##name, flags, text}

static PyMethodDef methods[] = {
    METHOD(all_reduce, METH_FASTCALL, "all_reduce(in, out, count, dtype, stream)"),
    METHOD(read_tensors, METH_O, "read_tensors(type) -> whether all_reduce_tensors can serve it"),
    METHOD(
        all_reduce_tensors, METH_FASTCALL,
        "all_reduce_tensors(in, out, stream) -> False, nothing done, for what is not contiguous, "
        "on the device, of the same supported type and shape"),
    METHOD(all_reduce_with, METH_FASTCALL,
           "all_reduce_with(in, out, count, dtype, stream, algorithm, source, blocks, threads, "
           "prefetch, prefetch_bytes)"),
    METHOD(reduce_scatter, METH_FASTCALL, "reduce_scatter(in, out, count, dtype, stream)"),
    METHOD(all_gather, METH_FASTCALL, "all_gather(in, out, bytes, stream)"),
    METHOD(all_reduce_norm, METH_VARARGS,
           "all_reduce_norm(x, residual_in, weight, normed, residual_out, quantised, row_scales, "
           "rows, hidden, x_stride, residual_in_stride, dtype, flags, eps, scale, stream)"),
    METHOD(tp_qknorm, METH_VARARGS,
           "tp_qknorm(q, k, q_weight, k_weight, tokens, q_width, k_width, q_stride, k_stride, "
           "dtype, flags, eps, stream)"),
    METHOD(tp_qknorm_max_blocks, METH_VARARGS, "tp_qknorm_max_blocks(q_width, k_width, dtype)"),
    METHOD(prepare, METH_VARARGS, "prepare(dtypes, flags): collective; compiles kernels"),
    METHOD(op_create, METH_VARARGS,
           "op_create(expression, dtype, row_length, scalars, arrays, array_dtypes): collective; "
           "compiles an expression for all_reduce_op"),
    METHOD(all_reduce_op, METH_VARARGS,
           "all_reduce_op(op, in, out, count, scalars, arrays, algorithm, source, blocks, threads, "
           "stream)"),
    METHOD(synchronize, METH_O, "synchronize(stream): waits, watching the peers"),
    METHOD(would_use, METH_VARARGS,
           "would_use(bytes, collective, dtype, mode, in_place, algorithm=0, source=0) -> "
           "(algorithm, source, blocks, threads, chunks, table, line, "
           "instead_of)"),
    METHOD(capture_begin, METH_NOARGS, "from here on captured calls note their memory"),
    METHOD(capture_end, METH_NOARGS, "collective: compares and registers the captured calls"),
    METHOD(capture_inputs, METH_NOARGS, "[(in, out, bytes)] of captured calls that take addresses"),
    METHOD(capture_end_mapped, METH_VARARGS, "capture_end_mapped(in, out, count): [call][rank]"),
    METHOD(status, METH_NOARGS, "None, or the failure record; may run beside other calls"),
    METHOD(abort, METH_NOARGS, "ends calls in flight on all ranks; may run beside other calls"),
    METHOD(set_timeout, METH_O, "set_timeout(milliseconds); may run beside other calls"),
    METHOD(stats, METH_NOARGS, "counters, in the order of onehop_stats"),
    METHOD(destroy, METH_NOARGS, "local; twice is once"),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"rank", (getter)get_rank, NULL, NULL, NULL},
    {"world_size", (getter)get_world_size, NULL, NULL, NULL},
    {"device", (getter)get_device, NULL, "(kind, ordinal)", NULL},
    {"closed", (getter)get_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A rank's onehop_context; see AllReduce for the easy way."},
    {Py_tp_init, (void *)context_init},
    {Py_tp_dealloc, (void *)context_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyObject *ext_context_type(void) {
    static PyType_Spec spec = {"onehop._onehop.Context", sizeof(Context), 0, Py_TPFLAGS_DEFAULT,
                               slots};
    return PyType_FromSpec(&spec);
}

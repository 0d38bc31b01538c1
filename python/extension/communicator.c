/* Communicator: an onehop_comm over memory that the caller owns, and what prepares such memory. */
#include "extension.h"

#include <string.h>
#include <unistd.h>

typedef struct Communicator {
    PyObject_HEAD onehop_comm *comm;
    size_t world_size;
    int host;
    ext_tensors tensors;
    ext_guard guard;
} Communicator;

static int enter(Communicator *self) {
    return ext_enter(&self->guard, self->comm, "onehop communicator");
}

static PyObject *none_or_raise(onehop_result result) {
    return result ? ext_raise(result) : Py_NewRef(Py_None);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* (device_kind, world_size, push_bytes, pull_bytes, max_blocks, max_registrations), zero for a
 * default. */
static int parse_layout(PyObject *tuple, onehop_layout_config *config_out) {
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    int kind;
    Py_ssize_t push_bytes = 0, pull_bytes = 0;
    if (!PyArg_ParseTuple(tuple, "ii|nnII;a layout", &kind, &config.world_size, &push_bytes,
                          &pull_bytes, &config.max_blocks, &config.max_registrations))
        return -1;
    config.device_kind = (onehop_device_kind)kind;
    config.push_bytes = (size_t)push_bytes;
    config.pull_bytes = (size_t)pull_bytes;
    *config_out = config;
    return 0;
}

PyObject *ext_layout(PyObject *module, PyObject *args) {
    onehop_layout_config config;
    onehop_layout layout;
    (void)module;
    if (parse_layout(args, &config)) return NULL;
    const onehop_result result = onehop_layout_get(&config, &layout);
    if (result) return ext_raise(result);
    return Py_BuildValue("(nnnnnII)", (Py_ssize_t)layout.symmetric_bytes,
                         (Py_ssize_t)layout.local_bytes, (Py_ssize_t)layout.host_bytes,
                         (Py_ssize_t)layout.push_bytes, (Py_ssize_t)layout.pull_bytes,
                         layout.max_blocks, layout.max_registrations);
}

PyObject *ext_storage_arm(PyObject *module, PyObject *args) {
    onehop_layout_config config;
    PyObject *layout, *symmetric, *local, *host;
    onehop_result result;
    int ordinal;
    (void)module;
    if (!PyArg_ParseTuple(args, "OiOOO", &layout, &ordinal, &symmetric, &local, &host) ||
        parse_layout(layout, &config))
        return NULL;
    const onehop_device device = {config.device_kind, ordinal};
    void *buffer = PyLong_AsVoidPtr(symmetric), *own = PyLong_AsVoidPtr(local),
         *pinned = PyLong_AsVoidPtr(host);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    result = onehop_storage_arm(&config, device, buffer, own, pinned);
    Py_END_ALLOW_THREADS;
    return none_or_raise(result);
}

/* ---- begin and end --------------------------------------------------------------------------- */

static int read_memory(PyObject *symmetric, PyObject *local, PyObject *host,
                       onehop_comm_config *c) {
    void **buffers = ext_addresses(symmetric, (size_t)c->world_size, "symmetric");
    if (!buffers) return -1;
    memcpy(c->symmetric, buffers, (size_t)c->world_size * sizeof *buffers);
    PyMem_Free(buffers);
    c->local = PyLong_AsVoidPtr(local);
    c->host = PyLong_AsVoidPtr(host);
    return PyErr_Occurred() ? -1 : 0;
}

static int communicator_init(Communicator *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"layout", "ordinal",          "rank",       "symmetric", "local",
                            "host",   "ranks_per_device", "timeout_ms", "flags",     "capability",
                            NULL};
    onehop_comm_config config = ONEHOP_CONFIG_INIT(onehop_comm_config);
    onehop_layout_config layout;
    PyObject *tuple, *symmetric, *local, *host;
    onehop_result result;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiiOOO|IIII", names, &tuple,
                                     &config.device.ordinal, &config.rank, &symmetric, &local,
                                     &host, &config.ranks_per_device, &config.timeout_ms,
                                     &config.flags, &config.capability) ||
        parse_layout(tuple, &layout))
        return -1;
    if (self->comm || self->guard.busy) {
        PyErr_SetString(PyExc_TypeError, "the communicator is made already");
        return -1;
    }
    if (layout.world_size < 1 || layout.world_size > ONEHOP_MAX_RANKS) {
        ext_raise_with(ONEHOP_ERR_WORLD_SIZE, "the world size is outside 1..16", NULL);
        return -1;
    }
    config.device.kind = layout.device_kind;
    config.world_size = layout.world_size;
    config.layout = &layout;
    if (read_memory(symmetric, local, host, &config)) return -1;
    self->guard.owner = getpid();
    self->host = layout.device_kind == ONEHOP_DEVICE_HOST;
    self->world_size = (size_t)layout.world_size;
    ext_tensors_place(&self->tensors, config.device);
    self->guard.busy = 1;
    Py_BEGIN_ALLOW_THREADS;
    result = onehop_comm_create(&config, &self->comm);
    Py_END_ALLOW_THREADS;
    self->guard.busy = 0;
    if (result) ext_raise(result);
    return result ? -1 : 0;
}

static void end(Communicator *self) {
    onehop_comm *comm = self->comm;
    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS;
    onehop_comm_destroy(comm);
    Py_END_ALLOW_THREADS;
}

static PyObject *communicator_destroy(Communicator *self, PyObject *unused) {
    (void)unused;
    if (self->comm && self->guard.owner == getpid() && enter(self)) return NULL;
    if (self->comm) end(self);
    Py_RETURN_NONE;
}

static void communicator_dealloc(Communicator *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->comm) end(self);
    ext_tensors_close(&self->tensors);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static onehop_result run(Communicator *self, const ext_call *c, const onehop_call *way) {
    onehop_result result;
    if (!self->host) /* launched, not waited for */
        return onehop_comm_all_reduce(self->comm, c->in, c->out, c->count, c->dtype, ONEHOP_SUM,
                                      way, c->stream);
    self->guard.busy = 1;
    EXT_WAITING(result, onehop_comm_all_reduce(self->comm, c->in, c->out, c->count, c->dtype,
                                               ONEHOP_SUM, way, c->stream));
    self->guard.busy = 0;
    return result;
}

static PyObject *communicator_all_reduce(Communicator *self, PyObject *const *args,
                                         Py_ssize_t count) {
    ext_call c;
    if (ext_check_count("all_reduce", count, 5) || ext_parse_call(args, &c) || enter(self))
        return NULL;
    return none_or_raise(run(self, &c, NULL));
}

static PyObject *communicator_read_tensors(Communicator *self, PyObject *type) {
    return PyBool_FromLong(ext_tensors_open(&self->tensors, type));
}

/* (in, out, stream): False, and nothing done, if the tensors are not the common kind. */
static PyObject *communicator_all_reduce_tensors(Communicator *self, PyObject *const *args,
                                                 Py_ssize_t count) {
    ext_call c;
    if (ext_check_count("all_reduce_tensors", count, 3) || enter(self)) return NULL;
    c.stream = PyLong_AsVoidPtr(args[2]);
    if (!c.stream && PyErr_Occurred()) return NULL;
    if (!ext_tensors_read(&self->tensors, args[0], args[1], &c)) Py_RETURN_FALSE;
    const onehop_result result = run(self, &c, NULL);
    return result ? ext_raise(result) : Py_NewRef(Py_True);
}

static PyObject *communicator_all_reduce_with(Communicator *self, PyObject *const *args,
                                              Py_ssize_t count) {
    ext_call c;
    onehop_call way;
    if (ext_check_count("all_reduce_with", count, count == 11 ? 11 : 12) ||
        ext_parse_call(args, &c) || ext_parse_way(args + 5, &way))
        return NULL;
    if (count == 12) way.registration = (uint32_t)PyLong_AsUnsignedLong(args[11]);
    if (PyErr_Occurred() || enter(self)) return NULL;
    return none_or_raise(run(self, &c, &way));
}

/* ---- registrations --------------------------------------------------------------------------- */

static PyObject *communicator_registration_take(Communicator *self, PyObject *unused) {
    uint32_t registration;
    (void)unused;
    if (enter(self)) return NULL;
    const onehop_result result = onehop_comm_registration_take(self->comm, &registration);
    return result ? ext_raise(result) : PyLong_FromUnsignedLong(registration);
}

/* (registration, in, out): world_size addresses each, or in None: staged; out None: see the
 * header. */
static PyObject *communicator_registration_fill(Communicator *self, PyObject *args) {
    PyObject *in, *out;
    unsigned registration;
    void **ins = NULL, **outs = NULL;
    if (!PyArg_ParseTuple(args, "IOO", &registration, &in, &out) || enter(self)) return NULL;
    if (in != Py_None) ins = ext_addresses(in, self->world_size, "in");
    if (out != Py_None && !PyErr_Occurred()) outs = ext_addresses(out, self->world_size, "out");
    onehop_result result = ONEHOP_OK;
    const int parsed = !PyErr_Occurred();
    if (parsed)
        result =
            onehop_comm_registration_fill(self->comm, registration, (const void *const *)ins, outs);
    PyMem_Free(ins);
    PyMem_Free(outs);
    return parsed ? none_or_raise(result) : NULL;
}

static PyObject *communicator_registration_release(Communicator *self, PyObject *number) {
    const unsigned long registration = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred() || enter(self)) return NULL;
    return none_or_raise(onehop_comm_registration_release(self->comm, (uint32_t)registration));
}

static PyObject *get_closed(Communicator *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(!self->comm);
}

/* ---- the type -------------------------------------------------------------------------------- */

#define METHOD(name, flags, text)                                                                  \
    {#name, (PyCFunction)(void (*)(void))communicator_##name, flags, text}

static PyMethodDef methods[] = {
    METHOD(all_reduce, METH_FASTCALL, "all_reduce(in, out, count, dtype, stream)"),
    METHOD(read_tensors, METH_O, "read_tensors(type) -> whether all_reduce_tensors can serve it"),
    METHOD(
        all_reduce_tensors, METH_FASTCALL,
        "all_reduce_tensors(in, out, stream) -> False, nothing done, for what is not contiguous, "
        "on the device, of the same supported type and shape"),
    METHOD(all_reduce_with, METH_FASTCALL,
           "all_reduce_with(in, out, count, dtype, stream, algorithm, source, blocks, threads, "
           "prefetch, prefetch_bytes[, registration])"),
    METHOD(registration_take, METH_NOARGS,
           "reserves a registration of the table of captured inputs"),
    METHOD(registration_fill, METH_VARARGS,
           "registration_fill(registration, in, out): addresses by rank; in None: staged"),
    METHOD(registration_release, METH_O, "registration_release(registration)"),
    METHOD(destroy, METH_NOARGS, "local; twice is once; calls in flight must have ended"),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"closed", (getter)get_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A rank's onehop_comm over memory that the caller owns."},
    {Py_tp_init, (void *)communicator_init},
    {Py_tp_dealloc, (void *)communicator_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyObject *ext_communicator_type(void) {
    static PyType_Spec spec = {"onehop._onehop.Communicator", sizeof(Communicator), 0,
                               Py_TPFLAGS_DEFAULT, slots};
    return PyType_FromSpec(&spec);
}

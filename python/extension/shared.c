/* What the objects of the module share: waits, errors, arguments. */
#include "extension.h"

/* ---- waits ----------------------------------------------------------------------------------- */

static _Thread_local ext_wait *waiting; /* the innermost of this thread */

static int hear_signals(void *user);

static void hear_for(ext_wait *wait) {
    waiting = wait;
    onehop_set_wait_hook(wait ? hear_signals : NULL, wait);
}

/* The library's wait hook, called without the GIL. The exception is kept aside: the library may
 * call the all-gather of the caller's before it returns. A handler that calls the library begins
 * anew. */
static int hear_signals(void *user) {
    ext_wait *wait = user;
    if (wait->type) return -1;
    hear_for(NULL);
    PyEval_RestoreThread(wait->thread);
    if (PyErr_CheckSignals()) PyErr_Fetch(&wait->type, &wait->error, &wait->trace);
    wait->thread = PyEval_SaveThread();
    hear_for(wait);
    return wait->type ? -1 : 0;
}

void ext_wait_begin(ext_wait *wait) {
    wait->outer = waiting;
    wait->type = wait->error = wait->trace = NULL;
    wait->thread = PyEval_SaveThread();
    hear_for(wait);
}

int ext_wait_end(ext_wait *wait) {
    hear_for(wait->outer);
    PyEval_RestoreThread(wait->thread);
    if (!wait->type) return 0;
    PyErr_Restore(wait->type, wait->error, wait->trace);
    return -1;
}

/* ---- errors ---------------------------------------------------------------------------------- */

PyObject *ext_failure(const onehop_failure *f) {
    return Py_BuildValue("(iiiIIIIs)", (int)f->result, f->rank, f->peer, f->sequence, f->site,
                         f->expected, f->seen, f->text);
}

/* Classes and their choice by number are Python's: onehop._errors. */
PyObject *ext_raise_with(onehop_result result, const char *text, const onehop_failure *failure) {
    if (PyErr_Occurred()) return NULL;
    PyObject *record = failure && failure->result ? ext_failure(failure) : Py_NewRef(Py_None);
    PyObject *errors = record ? PyImport_ImportModule("onehop._errors") : NULL;
    PyObject *error = NULL;
    if (errors)
        error = PyObject_CallMethod(errors, "make_error", "(iszO)", (int)result,
                                    onehop_result_name(result), text, record);
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(errors);
    Py_XDECREF(record);
    return NULL;
}

PyObject *ext_raise(onehop_result result) {
    return ext_raise_with(result, onehop_last_error(), NULL);
}

int ext_enter(const ext_guard *guard, const void *handle, const char *what) {
    const char *why = NULL;
    if (!handle)
        why = "it is closed";
    else if (guard->busy)
        why = "another thread is inside a call on it; one thread at a time";
    if (!why) return 0;
    PyObject *text = PyUnicode_FromFormat("%s: %s", what, why);
    if (text) {
        const char *utf8 = PyUnicode_AsUTF8AndSize(text, NULL);
        if (utf8) ext_raise_with(ONEHOP_ERR_STATE, utf8, NULL);
        Py_DECREF(text);
    }
    return -1;
}

/* ---- arguments ------------------------------------------------------------------------------- */

int ext_check_count(const char *name, Py_ssize_t found, Py_ssize_t expected) {
    if (found == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, found %zd", name, expected, found);
    return -1;
}

int ext_parse_call(PyObject *const *args, ext_call *call_out) {
    call_out->in = PyLong_AsVoidPtr(args[0]);
    call_out->out = PyLong_AsVoidPtr(args[1]);
    call_out->count = PyLong_AsSize_t(args[2]);
    call_out->dtype = (onehop_dtype)PyLong_AsLong(args[3]);
    call_out->stream = PyLong_AsVoidPtr(args[4]);
    return PyErr_Occurred() ? -1 : 0;
}

static uint32_t as_uint32(PyObject *number) {
    const unsigned long value = PyLong_AsUnsignedLong(number);
    if (value > UINT32_MAX && !PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "%lu does not fit 32 bits", value);
    return (uint32_t)value;
}

int ext_parse_way(PyObject *const *args, onehop_call *call_out) {
    const onehop_call none = ONEHOP_CONFIG_INIT(onehop_call);
    *call_out = none;
    call_out->algorithm = (onehop_algorithm)PyLong_AsLong(args[0]);
    call_out->source = (onehop_source)PyLong_AsLong(args[1]);
    call_out->blocks = as_uint32(args[2]);
    call_out->threads = as_uint32(args[3]);
    call_out->prefetch = PyLong_AsVoidPtr(args[4]);
    call_out->prefetch_bytes = PyLong_AsSize_t(args[5]);
    return PyErr_Occurred() ? -1 : 0;
}

void **ext_addresses(PyObject *sequence, size_t count, const char *what) {
    const Py_ssize_t found = PySequence_Size(sequence);
    if (found < 0) return NULL;
    if ((size_t)found != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zu addresses, found %zd", what, count, found);
        return NULL;
    }
    void **out = PyMem_Calloc(count ? count : 1, sizeof *out);
    if (!out) return PyErr_NoMemory(), NULL;
    for (size_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        out[i] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            PyMem_Free(out);
            return NULL;
        }
    }
    return out;
}

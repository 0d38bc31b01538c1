/* HostStream and HostGraph: what a CUDA stream and graph are to a GPU, for the host device. */
#include "extension.h"

typedef struct HostStream {
    PyObject_HEAD onehop_stream stream;
} HostStream;

typedef struct HostGraph {
    PyObject_HEAD onehop_host_graph *graph;
} HostGraph;

static PyObject *graph_type; /* set once, before any stream can be made */

static PyObject *none_or_raise(onehop_result result) {
    return result ? ext_raise(result) : Py_NewRef(Py_None);
}

/* ---- stream ---------------------------------------------------------------------------------- */

static int stream_init(HostStream *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) return -1;
    if (self->stream) return 0;
    const onehop_result result = onehop_host_stream_create(&self->stream);
    if (result) ext_raise(result);
    return result ? -1 : 0;
}

static void stream_dealloc(HostStream *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS;
    if (self->stream) onehop_host_stream_destroy(self->stream);
    Py_END_ALLOW_THREADS;
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *stream_synchronize(HostStream *self, PyObject *unused) {
    onehop_result result;
    (void)unused;
    EXT_WAITING(result, onehop_host_stream_synchronize(self->stream));
    return none_or_raise(result);
}

static PyObject *stream_capture_begin(HostStream *self, PyObject *unused) {
    (void)unused;
    return none_or_raise(onehop_host_stream_capture_begin(self->stream));
}

static PyObject *stream_capture_end(HostStream *self, PyObject *unused) {
    onehop_host_graph *graph = NULL;
    (void)unused;
    const onehop_result result = onehop_host_stream_capture_end(self->stream, &graph);
    if (result) return ext_raise(result);
    const allocfunc make = (allocfunc)PyType_GetSlot((PyTypeObject *)graph_type, Py_tp_alloc);
    HostGraph *made = (HostGraph *)make((PyTypeObject *)graph_type, 0);
    if (made)
        made->graph = graph;
    else
        onehop_host_graph_destroy(graph);
    return (PyObject *)made;
}

static PyObject *stream_handle(HostStream *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(self->stream);
}

static PyMethodDef stream_methods[] = {
    {"synchronize", (PyCFunction)stream_synchronize, METH_NOARGS, "waits until the queue is empty"},
    {"capture_begin", (PyCFunction)stream_capture_begin, METH_NOARGS, "records instead of running"},
    {"capture_end", (PyCFunction)stream_capture_end, METH_NOARGS, "-> HostGraph"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_properties[] = {
    {"handle", (getter)stream_handle, NULL, "for the argument `stream` of a call", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, "A queue with a worker thread. Memory of queued calls must stay."},
    {Py_tp_init, (void *)stream_init},
    {Py_tp_dealloc, (void *)stream_dealloc},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_properties},
    {0, NULL},
};

PyObject *ext_host_stream_type(void) {
    static PyType_Spec spec = {"onehop._onehop.HostStream", sizeof(HostStream), 0,
                               Py_TPFLAGS_DEFAULT, stream_slots};
    return PyType_FromSpec(&spec);
}

/* ---- graph ----------------------------------------------------------------------------------- */

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)type, (void)args, (void)kwargs;
    PyErr_SetString(PyExc_TypeError, "a HostGraph comes from HostStream.capture_end()");
    return NULL;
}

static void graph_dealloc(HostGraph *self) {
    PyTypeObject *type = Py_TYPE(self);
    onehop_host_graph_destroy(self->graph);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *graph_launch(HostGraph *self, PyObject *stream) {
    void *handle = PyLong_AsVoidPtr(stream);
    onehop_result result;
    if (PyErr_Occurred()) return NULL;
    EXT_WAITING(result, onehop_host_graph_launch(self->graph, handle));
    return none_or_raise(result);
}

static PyMethodDef graph_methods[] = {
    {"launch", (PyCFunction)graph_launch, METH_O, "launch(stream): queues the recorded calls"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot graph_slots[] = {
    {Py_tp_doc, "Recorded calls. Must live until they have run."},
    {Py_tp_new, (void *)graph_new},
    {Py_tp_dealloc, (void *)graph_dealloc},
    {Py_tp_methods, graph_methods},
    {0, NULL},
};

PyObject *ext_host_graph_type(void) {
    static PyType_Spec spec = {"onehop._onehop.HostGraph", sizeof(HostGraph), 0, Py_TPFLAGS_DEFAULT,
                               graph_slots};
    graph_type = PyType_FromSpec(&spec);
    return Py_XNewRef(graph_type);
}

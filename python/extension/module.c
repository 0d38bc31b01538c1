/* The module onehop._onehop: its functions, constants and types. */
#include "extension.h"

/* ---- functions ------------------------------------------------------------------------------- */

static PyObject *version(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLong(onehop_version());
}

/* {name: (value, text)} of every result there is. */
static PyObject *results(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *all = PyDict_New();
#define ADD(name, value, text)                                                                     \
    if (all) {                                                                                     \
        PyObject *pair = Py_BuildValue("(is)", (int)name, onehop_result_text(name));               \
        if (!pair || PyDict_SetItemString(all, onehop_result_name(name), pair)) Py_CLEAR(all);     \
        Py_XDECREF(pair);                                                                          \
    }
    ONEHOP_RESULTS(ADD)
#undef ADD
    return all;
}

#define NAME_FUNCTION(thing)                                                                       \
    static PyObject *thing##_name(PyObject *module, PyObject *number) {                            \
        (void)module;                                                                              \
        const long value = PyLong_AsLong(number);                                                  \
        if (value == -1 && PyErr_Occurred()) return NULL;                                          \
        return PyUnicode_FromString(onehop_##thing##_name((onehop_##thing)value));                 \
    }
NAME_FUNCTION(algorithm)
NAME_FUNCTION(source)
NAME_FUNCTION(collective)
NAME_FUNCTION(dtype)

static PyObject *dtype_bytes(PyObject *module, PyObject *number) {
    (void)module;
    const long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) return NULL;
    return PyLong_FromSize_t(onehop_dtype_bytes((onehop_dtype)value));
}

static PyMethodDef functions[] = {
    {"version", version, METH_NOARGS, "Version of the library: 10000 major + 100 minor + patch."},
    {"results", results, METH_NOARGS, "{name: (value, text)} of every result of the library."},
    {"algorithm_name", algorithm_name, METH_O, "Name of an algorithm's number."},
    {"source_name", source_name, METH_O, "Name of a source's number."},
    {"collective_name", collective_name, METH_O, "Name of a collective's number."},
    {"dtype_name", dtype_name, METH_O, "Name of a data type's number."},
    {"dtype_bytes", dtype_bytes, METH_O, "Bytes of one element, 0 for an unknown type."},
    {"layout", ext_layout, METH_VARARGS, "Sizes of a communicator's memory."},
    {"storage_arm", ext_storage_arm, METH_VARARGS, "Initialises one rank's memory."},
    {NULL, NULL, 0, NULL},
};

/* ---- the module ------------------------------------------------------------------------------ */

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_onehop", "libonehop, as it is.", -1, functions, NULL, NULL, NULL, NULL,
};

static int add_type(PyObject *module, const char *name, PyObject *type) {
    const int result = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return result;
}

static int add_constants(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        {"MAX_RANKS", ONEHOP_MAX_RANKS},
        {"DEVICE_AUTO", ONEHOP_DEVICE_AUTO},
        {"DEVICE_CUDA", ONEHOP_DEVICE_CUDA},
        {"DEVICE_HOST", ONEHOP_DEVICE_HOST},
        {"MODE_EAGER", ONEHOP_MODE_EAGER},
        {"MODE_GRAPH", ONEHOP_MODE_GRAPH},
        {"FLAG_EARLY_TRIGGER", ONEHOP_FLAG_EARLY_TRIGGER},
        {"FLAG_SHARE_GPU", ONEHOP_FLAG_SHARE_GPU},
        {"FLAG_NCCL", ONEHOP_FLAG_NCCL},
        {"FLAG_UNCAP", ONEHOP_FLAG_UNCAP},
        {"FLAG_ORDERED", ONEHOP_FLAG_ORDERED},
        {"PREPARE_ALWAYS", ONEHOP_PREPARE_ALWAYS},
        {"NORM_WEIGHT_PLUS_ONE", ONEHOP_NORM_WEIGHT_PLUS_ONE},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return -1;
    return 0;
}

PyMODINIT_FUNC PyInit__onehop(void);
PyMODINIT_FUNC PyInit__onehop(void) {
    if (onehop_version() / 100 != ONEHOP_VERSION / 100) {
        PyErr_Format(PyExc_ImportError,
                     "the module was built against version %d of libonehop and found version %d",
                     ONEHOP_VERSION, onehop_version());
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (add_constants(module) || add_type(module, "Context", ext_context_type()) ||
        add_type(module, "Communicator", ext_communicator_type()) ||
        add_type(module, "HostStream", ext_host_stream_type()) ||
        add_type(module, "HostGraph", ext_host_graph_type()))
        Py_CLEAR(module);
    return module;
}

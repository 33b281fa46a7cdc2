/* A whole call of torch.distributed, from its arguments to its handle, in one C function.
 *
 *     group.allreduce([tensor], opts)      in C: check, take the turn, all steps, a complete handle
 *                                          else: None, and Python makes the call from the start
 *                                          a rank is late: Python goes on from the step
 *
 * Python makes every call that is not plain: something watches the dispatcher, the tensor has gaps
 * or a dtype without compiled steps, another call is under way, or the group has failed.
 */
#include "native.h"

/* The arguments of the constructor, all by name. */
enum {
    SMALL,             /* NativeAllReduce for tensors below `large_bytes` */
    LARGE,             /* NativeAllReduce for the others */
    TENSOR,            /* torch.Tensor; subclasses are left to Python */
    STRIDED,           /* torch.strided */
    ALLREDUCE_OPTIONS, /* torch's class of options */
    BROADCAST_OPTIONS, /* the same for a broadcast */
    DTYPES,            /* dict of dtypes; see `Plain` */
    NUMBER_OF_MODES,   /* callable: dispatch modes of this thread */
    IS_PROFILING,      /* callable */
    QUEUE,             /* CallQueue: `error` */
    JOBS,              /* its queued calls */
    ACQUIRE,           /* of the lock that a call holds */
    RELEASE,           /* of the same lock */
    GIVE_UP,           /* callable(error): close the group */
    COMPLETED,         /* handle of every synchronous call */
    COMPLETED_WORK,    /* class: handle of an asynchronous call with its results */
    WRITER,            /* ProgressWriter: `memory` is None if nobody looks */
    BEGIN_PROGRESS,    /* callable(calls, word) */
    GO_ON,             /* callable: finish a call whose next step has to wait */
    FIELDS
};
static const char *const FIELD_NAMES[FIELDS] = {
    "small",          "large",           "tensor",       "strided", "allreduce_options",
    "broadcast_options", "dtypes",       "number_of_modes", "is_profiling", "queue",
    "jobs",           "acquire",         "release",      "give_up", "completed",
    "completed_work", "writer",          "begin_progress", "go_on"};

typedef struct {
    PyObject_HEAD
    PyObject *fields[FIELDS];
    int64_t large_bytes, calls_at, all_reduce_word, broadcast_word;
    int has_turn; /* cleared by Python when it takes over a call */
} CompiledCalls;

/* What a plain tensor is, as far as a call needs it. */
typedef struct {
    char *memory;
    int64_t length, bytes;
    int64_t dtype;  /* number of the dtype in the word of a call */
    int64_t reduce; /* code of its sum, whose successor is that of its mean; -1 without */
} Plain;

enum {
    IS_CPU,
    LAYOUT,
    DTYPE,
    IS_CONTIGUOUS,
    IS_NEG,
    IS_ZEROTENSOR,
    NUMEL,
    DATA_PTR,
    REDUCE_OP,
    ROOT_RANK,
    ASYNC_OP,
    ERROR,
    MEMORY,
    ATTRIBUTES
};
static const char *const ATTRIBUTE_NAMES[ATTRIBUTES] = {
    "is_cpu",   "layout",   "dtype",    "is_contiguous", "is_neg", "_is_zerotensor", "numel",
    "data_ptr", "reduceOp", "rootRank", "asyncOp",       "error",  "memory"};
static PyObject *attributes[ATTRIBUTES];

/* --- questions to Python objects: 1, 0, or -1 with an exception */

static int is_value(PyObject *value, PyObject *expected) {
    if (value == NULL) return -1;
    int same = value == expected;
    Py_DECREF(value);
    return same;
}

static int attribute_is(PyObject *object, int name, PyObject *expected) {
    return is_value(PyObject_GetAttr(object, attributes[name]), expected);
}

static int method_is(PyObject *object, int name, PyObject *expected) {
    return is_value(PyObject_CallMethodNoArgs(object, attributes[name]), expected);
}

static int is_true(PyObject *value) {
    if (value == NULL) return -1;
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* Return the number, and -1 with an exception. */
static int64_t number(PyObject *value) {
    if (value == NULL) return -1;
    int64_t found = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return found;
}

static int is_watched(CompiledCalls *self) {
    int modes = is_true(PyObject_CallNoArgs(self->fields[NUMBER_OF_MODES]));
    return modes ? modes : is_true(PyObject_CallNoArgs(self->fields[IS_PROFILING]));
}

/* Is it a real dense tensor on the CPU whose memory holds its elements, one after the other? */
static int read_plain(CompiledCalls *self, PyObject *tensor, Plain *plain) {
    int found;
    if (Py_TYPE(tensor) != (PyTypeObject *)self->fields[TENSOR]) return 0;
    if ((found = attribute_is(tensor, IS_CPU, Py_True)) < 1) return found;
    if ((found = attribute_is(tensor, LAYOUT, self->fields[STRIDED])) < 1) return found;
    if ((found = method_is(tensor, IS_CONTIGUOUS, Py_True)) < 1) return found;
    if ((found = method_is(tensor, IS_NEG, Py_False)) < 1) return found;
    if ((found = method_is(tensor, IS_ZEROTENSOR, Py_False)) < 1) return found;
    PyObject *dtype = PyObject_GetAttr(tensor, attributes[DTYPE]);
    if (dtype == NULL) return -1;
    PyObject *entry = PyDict_GetItemWithError(self->fields[DTYPES], dtype);
    Py_DECREF(dtype);
    if (entry == NULL) return PyErr_Occurred() ? -1 : 0;
    int64_t packed = PyLong_AsLongLong(entry); /* number, bytes, code + 1: 8 bits each */
    plain->dtype = packed & 255;
    plain->reduce = (packed >> 16 & 255) - 1;
    plain->length = number(PyObject_CallMethodNoArgs(tensor, attributes[NUMEL]));
    plain->bytes = plain->length * (packed >> 8 & 255);
    plain->memory =
        (char *)(intptr_t)number(PyObject_CallMethodNoArgs(tensor, attributes[DATA_PTR]));
    return PyErr_Occurred() ? -1 : plain->memory != NULL || !plain->bytes;
}

/* --- calls */

/* Say that a call has failed in Python, unless Python has said so itself, and keep the error. */
static PyObject *give_up(CompiledCalls *self) {
    if (!self->has_turn) return NULL;
    self->has_turn = 0;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    Py_XDECREF(PyObject_CallOneArg(self->fields[GIVE_UP], error));
    PyErr_Clear();
    Py_XDECREF(PyObject_CallNoArgs(self->fields[RELEASE]));
    PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    return NULL;
}

/* Make a call in this thread's turn. */
static PyObject *make_call(CompiledCalls *self, PyObject *tensors, PyObject *opts,
                           const Plain *plain, int code, int64_t word, int is_async) {
    NativeAllReduce *steps =
        (NativeAllReduce *)self->fields[plain->bytes < self->large_bytes ? SMALL : LARGE];
    int64_t *words = steps->words[steps->rank];
    int64_t calls = ++words[self->calls_at], first = words[steps->phase_at] + 1;
    self->has_turn = 1;
    int is_shown = attribute_is(self->fields[WRITER], MEMORY, Py_None);
    if (is_shown < 0) return give_up(self);
    if (!is_shown) {
        PyObject *shown = PyObject_CallFunction(self->fields[BEGIN_PROGRESS], "LL",
                                                (long long)calls, (long long)word);
        if (shown == NULL) return give_up(self);
        Py_DECREF(shown);
    }
    int64_t step = take_call_steps(steps, plain->memory, plain->bytes, code, word, first, 0);
    if (step >= 0) {
        PyObject *work = PyObject_CallFunction(
            self->fields[GO_ON], "OOOOLLiLLL", self, steps, tensors, opts,
            (long long)(intptr_t)plain->memory, (long long)plain->bytes, code, (long long)word,
            (long long)first, (long long)step);
        return work ? work : give_up(self);
    }
    self->has_turn = 0;
    PyObject *released = PyObject_CallNoArgs(self->fields[RELEASE]);
    if (released == NULL) return NULL;
    Py_DECREF(released);
    if (is_async) return PyObject_CallOneArg(self->fields[COMPLETED_WORK], tensors);
    return Py_NewRef(self->fields[COMPLETED]);
}

/* Make a call if no other one is under way and the group works. */
static PyObject *make_in_turn(CompiledCalls *self, PyObject *tensors, PyObject *opts,
                              const Plain *plain, int code, int64_t word) {
    int is_async = is_true(PyObject_GetAttr(opts, attributes[ASYNC_OP]));
    if (is_async < 0) return NULL;
    int works = attribute_is(self->fields[QUEUE], ERROR, Py_None);
    if (works < 0) return NULL;
    Py_ssize_t jobs = PyObject_Size(self->fields[JOBS]);
    if (jobs < 0) return NULL;
    if (!works || jobs) Py_RETURN_NONE;
    int has_turn = is_true(PyObject_CallOneArg(self->fields[ACQUIRE], Py_False));
    if (has_turn < 0) return NULL;
    if (!has_turn) Py_RETURN_NONE;
    return make_call(self, tensors, opts, plain, code, word, is_async);
}

/* Return 1 if `tensors` and `opts` are what torch.distributed passes and nothing watches. */
static int is_usual(CompiledCalls *self, PyObject *const *args, Py_ssize_t count, int options,
                    Plain *plain) {
    if (count != 2 || Py_TYPE(args[1]) != (PyTypeObject *)self->fields[options]) return 0;
    if (!PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) != 1) return 0;
    int is_seen = is_watched(self);
    if (is_seen) return is_seen < 0 ? -1 : 0;
    return read_plain(self, PyList_GET_ITEM(args[0], 0), plain);
}

PyDoc_STRVAR(all_reduce_doc,
             "all_reduce(tensors, opts) -> Work or None\n\n"
             "Make an all-reduce of a list of one tensor with torch's options. Return its handle;\n"
             "None, and nothing has been done, if it is not a plain one.");

static PyObject *all_reduce(CompiledCalls *self, PyObject *const *args, Py_ssize_t count) {
    Plain plain;
    int usual = is_usual(self, args, count, ALLREDUCE_OPTIONS, &plain);
    if (usual < 0) return NULL;
    if (!usual || plain.reduce < 0) Py_RETURN_NONE;
    PyObject *operation = PyObject_GetAttr(args[1], attributes[REDUCE_OP]);
    if (operation == NULL) return NULL;
    Py_hash_t mean = PyObject_Hash(operation); /* 0 for a sum, 1 for a mean: see plain_calls.py */
    Py_DECREF(operation);
    if (mean == -1) return NULL;
    if (mean != 0 && mean != 1) Py_RETURN_NONE;
    int64_t word = self->all_reduce_word + (mean << 5) + (plain.dtype << 9) + (plain.length << 25);
    return make_in_turn(self, args[0], args[1], &plain, (int)(plain.reduce + mean), word);
}

PyDoc_STRVAR(broadcast_doc,
             "broadcast(tensors, opts) -> Work or None\n\n"
             "Make a broadcast of a list of one tensor, like `all_reduce`.");

static PyObject *broadcast(CompiledCalls *self, PyObject *const *args, Py_ssize_t count) {
    Plain plain;
    int usual = is_usual(self, args, count, BROADCAST_OPTIONS, &plain);
    if (usual < 0) return NULL;
    if (!usual || plain.bytes >= self->large_bytes) Py_RETURN_NONE;
    int64_t root = number(PyObject_GetAttr(args[1], attributes[ROOT_RANK]));
    if (root == -1 && PyErr_Occurred()) return NULL;
    if (root < 0 || root >= ((NativeAllReduce *)self->fields[SMALL])->size) Py_RETURN_NONE;
    int64_t word =
        self->broadcast_word + (plain.dtype << 9) + (root << 15) + (plain.length << 25);
    return make_in_turn(self, args[0], args[1], &plain, BROADCAST + (int)root, word);
}

/* --- the Python type */

static int init(CompiledCalls *self, PyObject *args, PyObject *kwargs) {
    long long numbers[4];
    if (!PyArg_ParseTuple(args, "LLLL", &numbers[0], &numbers[1], &numbers[2], &numbers[3]))
        return -1;
    self->large_bytes = numbers[0];
    self->calls_at = numbers[1];
    self->all_reduce_word = numbers[2];
    self->broadcast_word = numbers[3];
    for (int i = 0; i < ATTRIBUTES; i++)
        if (!attributes[i] && !(attributes[i] = PyUnicode_InternFromString(ATTRIBUTE_NAMES[i])))
            return -1;
    for (int i = 0; i < FIELDS; i++) {
        PyObject *value = kwargs ? PyDict_GetItemString(kwargs, FIELD_NAMES[i]) : NULL;
        int is_steps = i == SMALL || i == LARGE;
        if (!value || (is_steps && !PyObject_TypeCheck(value, &NativeAllReduceType))) {
            PyErr_Format(PyExc_TypeError, "CompiledCalls needs %s", FIELD_NAMES[i]);
            return -1;
        }
        Py_XSETREF(self->fields[i], Py_NewRef(value));
    }
    return 0;
}

static int traverse(CompiledCalls *self, visitproc visit, void *arg) {
    for (int i = 0; i < FIELDS; i++) Py_VISIT(self->fields[i]);
    return 0;
}

static int clear(CompiledCalls *self) {
    for (int i = 0; i < FIELDS; i++) Py_CLEAR(self->fields[i]);
    return 0;
}

static void dealloc(CompiledCalls *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *take_over(CompiledCalls *self, PyObject *Py_UNUSED(none)) {
    self->has_turn = 0;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))all_reduce, METH_FASTCALL, all_reduce_doc},
    {"broadcast", (PyCFunction)(void (*)(void))broadcast, METH_FASTCALL, broadcast_doc},
    {"take_over", (PyCFunction)take_over, METH_NOARGS,
     "Leave the turn of the present call to Python, which releases it."},
    {NULL},
};

PyTypeObject CompiledCallsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shoal.shm_backend._native.CompiledCalls",
    .tp_doc = "The plain calls of one rank in one group.",
    .tp_basicsize = sizeof(CompiledCalls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = methods,
    .tp_init = (initproc)init,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};

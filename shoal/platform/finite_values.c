/* Looks for NaN and infinities in the memory of tensors, each value once; or while it copies them.
 *
 *     sign  exponent  fraction
 *     x     11111111  ...         a NaN or an infinity: 1 more in the last place of the exponent
 *     y     00000000  ...         carries into the sign, so the first bit of both differs
 *
 * A sum of the values may overflow where no value does, and a call of torch for each tensor takes
 * longer than a small tensor's values. What is not dense in the CPU's memory is left to torch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define VERSION 2 /* of the arguments; see finite_values.py */
#define STREAMS 4 /* a processor fetches several sequences of addresses ahead of their use */
#define BLOCK 64  /* values of a stream between two tests of what was found */
#define GIL_BYTES (1 << 20) /* up to here, to release the interpreter's lock costs more */

/* Compiled twice; the loader chooses. With vectors of 32 bytes a look takes 0.6 of the time. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* --- values */

#define CARRIED(value, unit) (((value) + (unit)) ^ (value))

/* Return 1 if all values are finite. `unit` is 1 in the last place of the exponent. */
#define LOOK(name, word, unit)                                                                     \
    FOR_EACH_PROCESSOR static int name(const void *memory, int64_t count) {                        \
        const word last = (word)(unit), sign = (word)((word)1 << (8 * sizeof(word) - 1));          \
        const word *a = memory;                                                                    \
        int64_t length = count / STREAMS / BLOCK * BLOCK, i = 0;                                   \
        const word *b = a + length, *c = b + length, *d = c + length;                              \
        word found = 0;                                                                            \
        for (; i < length && !(found & sign); i += BLOCK)                                          \
            for (int64_t k = i; k < i + BLOCK; k++)                                                \
                found |= (word)(CARRIED(a[k], last) | CARRIED(b[k], last) | CARRIED(c[k], last) |  \
                                CARRIED(d[k], last));                                              \
        for (i = STREAMS * length; i < count; i++) found |= (word)CARRIED(a[i], last);             \
        return !(found & sign);                                                                    \
    }

LOOK(half_is_finite, uint16_t, 1 << 10)
LOOK(bfloat16_is_finite, uint16_t, 1 << 7)
LOOK(float_is_finite, uint32_t, 1 << 23)
LOOK(double_is_finite, uint64_t, (uint64_t)1 << 52)

/* Copy all values, bit by bit, and return 1 if they are finite: memory is read once for both. */
#define COPY(name, word, unit)                                                                     \
    FOR_EACH_PROCESSOR static int name(void *target, const void *source, int64_t count) {          \
        const word last = (word)(unit), sign = (word)((word)1 << (8 * sizeof(word) - 1));          \
        const word *from = source;                                                                 \
        word *to = target, found = 0;                                                              \
        for (int64_t i = 0; i < count; i++) {                                                      \
            word value = from[i];                                                                  \
            to[i] = value;                                                                         \
            found |= (word)CARRIED(value, last);                                                   \
        }                                                                                          \
        return !(found & sign);                                                                    \
    }

COPY(copy_half, uint16_t, 1 << 10)
COPY(copy_bfloat16, uint16_t, 1 << 7)
COPY(copy_float, uint32_t, 1 << 23)
COPY(copy_double, uint64_t, (uint64_t)1 << 52)

/* The kinds of values, as finite_values.py numbers them. */
static const struct {
    int (*look)(const void *memory, int64_t count);
    int (*copy)(void *target, const void *source, int64_t count);
    int64_t bytes;
} KINDS[] = {{half_is_finite, copy_half, 2},
             {bfloat16_is_finite, copy_bfloat16, 2},
             {float_is_finite, copy_float, 4},
             {double_is_finite, copy_double, 8}};
#define KINDS_COUNT ((int)(sizeof KINDS / sizeof *KINDS))

/* --- tensors: 1, 0, or -1 with an exception */

enum { IS_CPU, LAYOUT, DTYPE, IS_CONTIGUOUS, NUMEL, DATA_PTR, IS_NEG, ATTRIBUTES };
static const char *const ATTRIBUTE_NAMES[ATTRIBUTES] = {
    "is_cpu", "layout", "dtype", "is_contiguous", "numel", "data_ptr", "is_neg"};
static PyObject *attributes[ATTRIBUTES];

static int is_value(PyObject *value, PyObject *expected) {
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == expected;
}

static long long number(PyObject *value) {
    if (value == NULL) return -1;
    long long found = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return found;
}

/* Find the memory of a dense tensor on the CPU; 0 for any other. */
static int read_plain(PyObject *tensor, PyObject *strided, PyObject *kinds, int *kind,
                      const void **memory, int64_t *count) {
    int found;
    if ((found = is_value(PyObject_GetAttr(tensor, attributes[IS_CPU]), Py_True)) < 1) return found;
    if ((found = is_value(PyObject_GetAttr(tensor, attributes[LAYOUT]), strided)) < 1) return found;
    PyObject *dtype = PyObject_GetAttr(tensor, attributes[DTYPE]);
    if (dtype == NULL) return -1;
    PyObject *known = PyDict_GetItemWithError(kinds, dtype);
    Py_DECREF(dtype);
    if (known == NULL) return PyErr_Occurred() ? -1 : 0;
    *kind = (int)PyLong_AsLong(known);
    if (PyErr_Occurred()) return -1;
    if (*kind < 0 || *kind >= KINDS_COUNT) return 0;
    found = is_value(PyObject_CallMethodNoArgs(tensor, attributes[IS_CONTIGUOUS]), Py_True);
    if (found < 1) return found;
    *count = number(PyObject_CallMethodNoArgs(tensor, attributes[NUMEL]));
    if (*count < 0) return -1;
    PyObject *address = PyObject_CallMethodNoArgs(tensor, attributes[DATA_PTR]);
    *memory = (const void *)(intptr_t)number(address);
    return PyErr_Occurred() ? -1 : *memory != NULL || !*count;
}

static int look_at(int kind, const void *memory, int64_t count) {
    if (count * KINDS[kind].bytes <= GIL_BYTES) return KINDS[kind].look(memory, count);
    int finite;
    Py_BEGIN_ALLOW_THREADS
    finite = KINDS[kind].look(memory, count);
    Py_END_ALLOW_THREADS
    return finite;
}

/* Look at one tensor, or append it to `others`. */
static int is_finite(PyObject *tensor, PyObject *const *args, int64_t max_bytes) {
    const void *memory;
    int64_t count;
    int kind, plain = (PyObject *)Py_TYPE(tensor) == args[2];
    if (plain) plain = read_plain(tensor, args[3], args[4], &kind, &memory, &count);
    if (plain < 0) return -1;
    if (plain && count <= max_bytes / KINDS[kind].bytes) return look_at(kind, memory, count);
    return PyList_Append(args[1], tensor) ? -1 : 1;
}

PyDoc_STRVAR(are_finite_doc,
             "are_finite(tensors, others, tensor_type, strided, kinds, max_bytes) -> bool\n\n"
             "Return False if a value in a list of tensors is not finite. Those that it does not\n"
             "look at are appended to the list `others`: not of exactly `tensor_type`, not\n"
             "`strided`, not dense on the CPU, of a dtype that is not in the dict `kinds`, or\n"
             "larger than `max_bytes`.");

static PyObject *are_finite(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t length) {
    if (length != 6 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyDict_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "are_finite takes two lists, a type, a layout, a dict "
                                             "and a number");
    long long max_bytes = PyLong_AsLongLong(args[5]);
    if (max_bytes == -1 && PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *tensor = Py_NewRef(PyList_GET_ITEM(args[0], i)); /* threads may change the list */
        int finite = is_finite(tensor, args, max_bytes);
        Py_DECREF(tensor);
        if (finite < 0) return NULL;
        if (!finite) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Copy one tensor to another: 1 if it is finite, 0 if not, 2 if torch has to copy, -1 on error. */
static int copy_one(PyObject *target, PyObject *source, PyObject *const *args, int64_t max_bytes) {
    const void *from, *to;
    int64_t count, room;
    int kind, target_kind, finite, found;
    if ((PyObject *)Py_TYPE(source) != args[3] || (PyObject *)Py_TYPE(target) != args[3]) return 2;
    found = read_plain(source, args[4], args[5], &kind, &from, &count);
    if (found < 1) return found ? -1 : 2;
    found = read_plain(target, args[4], args[5], &target_kind, &to, &room);
    if (found < 1) return found ? -1 : 2;
    if (kind != target_kind || count != room || count > max_bytes / KINDS[kind].bytes) return 2;
    /* Of such a view of complex numbers the memory has the other sign. */
    found = is_value(PyObject_CallMethodNoArgs(source, attributes[IS_NEG]), Py_False);
    if (found < 1) return found ? -1 : 2;
    if (count * KINDS[kind].bytes <= GIL_BYTES) return KINDS[kind].copy((void *)to, from, count);
    Py_BEGIN_ALLOW_THREADS
    finite = KINDS[kind].copy((void *)to, from, count);
    Py_END_ALLOW_THREADS
    return finite;
}

PyDoc_STRVAR(copy_finite_doc,
             "copy_finite(targets, sources, others, tensor_type, strided, kinds, max_bytes) -> bool\n"
             "\n"
             "Copy a list of tensors to another of the same length and shapes, and return False if\n"
             "a value that was copied is not finite. The indices of pairs that are left to torch\n"
             "are appended to the list `others`: where `are_finite` would not look at one of them,\n"
             "or where their dtypes differ.");

static PyObject *copy_finite(PyObject *Py_UNUSED(module), PyObject *const *args,
                             Py_ssize_t length) {
    if (length != 7 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        !PyDict_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "copy_finite takes three lists, a type, a layout, a "
                                             "dict and a number");
    long long max_bytes = PyLong_AsLongLong(args[6]);
    if (max_bytes == -1 && PyErr_Occurred()) return NULL;
    int all_finite = 1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]) && i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *target = Py_NewRef(PyList_GET_ITEM(args[0], i));
        PyObject *source = Py_NewRef(PyList_GET_ITEM(args[1], i));
        int finite = copy_one(target, source, args, max_bytes);
        Py_DECREF(target);
        Py_DECREF(source);
        if (finite < 0) return NULL;
        if (finite == 0) all_finite = 0;
        if (finite != 2) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        int failed = index == NULL || PyList_Append(args[2], index);
        Py_XDECREF(index);
        if (failed) return NULL;
    }
    return PyBool_FromLong(all_finite);
}

static PyMethodDef methods[] = {
    {"are_finite", (PyCFunction)(void (*)(void))are_finite, METH_FASTCALL, are_finite_doc},
    {"copy_finite", (PyCFunction)(void (*)(void))copy_finite, METH_FASTCALL, copy_finite_doc},
    {NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_finite_values", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__finite_values(void) {
    for (int i = 0; i < ATTRIBUTES; i++)
        if (!attributes[i] && !(attributes[i] = PyUnicode_InternFromString(ATTRIBUTE_NAMES[i])))
            return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", VERSION) < 0) Py_CLEAR(made);
    return made;
}

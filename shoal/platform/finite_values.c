/* Looks for NaN and infinities in the memory of tensors, each value once; or while it copies them.
 *
 *     sign  exponent  fraction
 *     x     11111111  ...         a NaN or an infinity: 1 more in the last place of the exponent
 *     y     00000000  ...         carries into the sign, so the first bit of both differs
 *
 * A sum of the values may overflow where no value does, and a call of torch for each tensor takes
 * longer than a small tensor's values. What is not dense in the CPU's memory is left to torch.
 *
 * DLPack's exchange of C functions says where a tensor's values lie, in one call: to ask a tensor
 * for six attributes takes longer than to look at a small one. See
 * https://dmlc.github.io/dlpack/latest/c_api.html
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define VERSION 3 /* of the arguments; see finite_values.py */
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

/* --- DLPack, version 1 */

enum { FLOAT = 2, BFLOAT = 4 };           /* codes of dtypes */
enum { CPU = 1, CPU_PINNED_BY_CUDA = 3 }; /* devices */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dims;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in values */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export_owned, *import_owned;
    int (*describe)(void *object, DLTensor *described); /* owns nothing; -1 with an exception */
} ExchangeFunctions;

/* --- kinds of values */

typedef struct {
    uint8_t code, bits;
    int (*look)(const void *memory, int64_t count);
    int (*copy)(void *target, const void *source, int64_t count);
} Kind;

static const Kind KINDS[] = {{FLOAT, 16, half_is_finite, copy_half},
                             {BFLOAT, 16, bfloat16_is_finite, copy_bfloat16},
                             {FLOAT, 32, float_is_finite, copy_float},
                             {FLOAT, 64, double_is_finite, copy_double}};
#define KINDS_COUNT (sizeof KINDS / sizeof *KINDS)

typedef struct {
    const Kind *kind;
    void *memory;
    int64_t count, bytes;
} Values;

/* Return 1 if the values of a tensor lie one after the other in their order, and count them. */
static int is_contiguous(const DLTensor *tensor, int64_t *count) {
    *count = 1;
    for (int32_t i = 0; i < tensor->dims; i++) *count *= tensor->shape[i];
    int64_t stride = 1;
    for (int32_t i = tensor->dims - 1; i >= 0 && *count; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride) return 0;
        stride *= tensor->shape[i];
    }
    return 1;
}

/* Find the values of a plain tensor that lie contiguous in the CPU's memory; 0 for any other. */
static int find_values(PyObject *tensor, PyObject *tensor_type, const ExchangeFunctions *functions,
                       Values *found) {
    DLTensor described;
    if ((PyObject *)Py_TYPE(tensor) != tensor_type) return 0;
    if (functions->describe(tensor, &described)) { /* sparse, for example */
        PyErr_Clear();
        return 0;
    }
    if (described.device.type != CPU && described.device.type != CPU_PINNED_BY_CUDA) return 0;
    found->kind = NULL;
    for (size_t i = 0; i < KINDS_COUNT; i++)
        if (KINDS[i].code == described.dtype.code && KINDS[i].bits == described.dtype.bits)
            found->kind = &KINDS[i];
    if (!found->kind || described.dtype.lanes != 1) return 0;
    if (!is_contiguous(&described, &found->count)) return 0;
    found->memory = (char *)described.data + described.byte_offset;
    found->bytes = found->count * found->kind->bits / 8;
    return 1;
}

/* Return the functions in a capsule, or NULL with an exception. */
static const ExchangeFunctions *functions_in(PyObject *capsule) {
    const ExchangeFunctions *functions = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (functions && functions->major == 1 && functions->describe) return functions;
    if (functions) PyErr_SetString(PyExc_TypeError, "not a description by DLPack, version 1");
    return NULL;
}

/* --- lists of tensors */

static PyObject *is_neg; /* the name */

static int look_at(const Values *values) {
    if (values->bytes <= GIL_BYTES) return values->kind->look(values->memory, values->count);
    int finite;
    Py_BEGIN_ALLOW_THREADS
    finite = values->kind->look(values->memory, values->count);
    Py_END_ALLOW_THREADS
    return finite;
}

PyDoc_STRVAR(are_finite_doc,
             "are_finite(tensors, others, tensor_type, exchange, max_bytes) -> bool\n\n"
             "Return False if a value in a list of tensors is not finite. Those that it does not\n"
             "look at are appended to the list `others`: not of exactly `tensor_type`, not\n"
             "contiguous in the CPU's memory, no floating-point numbers, or larger than\n"
             "`max_bytes`. `exchange` is the type's `__dlpack_c_exchange_api__`.");

static PyObject *are_finite(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t length) {
    if (length != 5 || !PyList_Check(args[0]) || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "are_finite takes two lists, a type, a capsule and a "
                                             "number");
    const ExchangeFunctions *functions = functions_in(args[3]);
    long long max_bytes = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        Values values;
        PyObject *tensor = Py_NewRef(PyList_GET_ITEM(args[0], i)); /* threads may change the list */
        int finite = 1, failed = 0;
        if (find_values(tensor, args[2], functions, &values) && values.bytes <= max_bytes)
            finite = look_at(&values);
        else
            failed = PyList_Append(args[1], tensor);
        Py_DECREF(tensor);
        if (failed) return NULL;
        if (!finite) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Copy one tensor to another: 1 if it is finite, 0 if not, 2 if torch has to copy, -1 on error. */
static int copy_one(PyObject *target, PyObject *source, PyObject *tensor_type,
                    const ExchangeFunctions *functions, int64_t max_bytes) {
    Values from, to;
    if (!find_values(source, tensor_type, functions, &from)) return 2;
    if (!find_values(target, tensor_type, functions, &to)) return 2;
    if (from.kind != to.kind || from.count != to.count || from.bytes > max_bytes) return 2;
    /* Of such a view of complex numbers the memory has the other sign. */
    PyObject *is_negative = PyObject_CallMethodNoArgs(source, is_neg);
    if (is_negative == NULL) return -1;
    Py_DECREF(is_negative);
    if (is_negative != Py_False) return 2;
    if (from.bytes <= GIL_BYTES) return from.kind->copy(to.memory, from.memory, from.count);
    int finite;
    Py_BEGIN_ALLOW_THREADS
    finite = from.kind->copy(to.memory, from.memory, from.count);
    Py_END_ALLOW_THREADS
    return finite;
}

PyDoc_STRVAR(copy_finite_doc,
             "copy_finite(targets, sources, others, tensor_type, exchange, max_bytes) -> bool\n\n"
             "Copy a list of tensors to another of the same length and shapes, and return False if\n"
             "a value that was copied is not finite. The indices of pairs that are left to torch\n"
             "are appended to the list `others`: where `are_finite` would not look at one of them,\n"
             "or where their dtypes differ.");

static PyObject *copy_finite(PyObject *Py_UNUSED(module), PyObject *const *args,
                             Py_ssize_t length) {
    if (length != 6 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "copy_finite takes three lists, a type, a capsule and "
                                             "a number");
    const ExchangeFunctions *functions = functions_in(args[4]);
    long long max_bytes = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    int all_finite = 1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]) && i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *target = Py_NewRef(PyList_GET_ITEM(args[0], i));
        PyObject *source = Py_NewRef(PyList_GET_ITEM(args[1], i));
        int finite = copy_one(target, source, args[3], functions, max_bytes);
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
    if (!is_neg && !(is_neg = PyUnicode_InternFromString("is_neg"))) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", VERSION) < 0) Py_CLEAR(made);
    return made;
}

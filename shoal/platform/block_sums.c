/* The sums of block_digest.py over one block of a file, in one pass over its memory.
 *
 *     low    sum of  w_i  a_i          mod 2^64, of the words w_i of 64 bits and the factors a_i, b_i
 *     high   sum of (w_i >> 31) b_i    mod 2^64, the shift being that of signed numbers
 *
 * torch needs three passes for them, and memory for the shifted words.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VERSION 1 /* of the arguments; see block_digest.py */

/* Compiled for several processors; the loader chooses. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

FOR_EACH_PROCESSOR static void add_up(const unsigned char *block, const uint64_t *a,
                                      const uint64_t *b, Py_ssize_t words, uint64_t sums[2]) {
    uint64_t low = 0, high = 0;
    for (Py_ssize_t i = 0; i < words; i++) {
        int64_t word;
        memcpy(&word, block + 8 * i, 8); /* a file's bytes may begin anywhere in memory */
        low += (uint64_t)word * a[i];
        high += (uint64_t)(word >> 31) * b[i];
    }
    sums[0] = low;
    sums[1] = high;
}

PyDoc_STRVAR(block_sums_doc,
             "block_sums(block, low_factors, high_factors) -> (low, high)\n\n"
             "Return both sums of a block. All three are contiguous buffers of the same length, a\n"
             "multiple of 8 bytes. Other threads may run meanwhile.");

static PyObject *block_sums(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block, a, b;
    if (!PyArg_ParseTuple(args, "y*y*y*", &block, &a, &b)) return NULL;
    PyObject *result = NULL;
    if (block.len % 8 || a.len != block.len || b.len != block.len) {
        PyErr_SetString(PyExc_ValueError, "block_sums takes three buffers of one length");
    } else {
        uint64_t sums[2];
        Py_BEGIN_ALLOW_THREADS
        add_up(block.buf, a.buf, b.buf, block.len / 8, sums);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("KK", (unsigned long long)sums[0], (unsigned long long)sums[1]);
    }
    PyBuffer_Release(&block);
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return result;
}

static PyMethodDef methods[] = {{"block_sums", block_sums, METH_VARARGS, block_sums_doc}, {NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_block_sums", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__block_sums(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", VERSION) < 0) Py_CLEAR(made);
    return made;
}

/* The all-reduces and broadcasts of collectives.py with no Python between their steps. For a small tensor the
 * interpreter takes longer than the additions do. A large tensor needs many small slices, which
 * stay in the processor's caches, and each slice costs time in the interpreter.
 *
 * In one pass, every rank reduces the full slice. In two passes, every rank reduces its piece of
 * the slice, and all ranks read the pieces of the others:
 *
 *     turn     one pass, rank 0      two passes, rank 0
 *     0        write a0              write a0
 *     1        write b0, reduce a    write b0, reduce A
 *     2        write c0, reduce b    write c0, read a, reduce B
 *     3        reduce c              read b, reduce C
 *     4                              read c
 *
 * A step reads what others wrote in an earlier turn, so it seldom waits. Words, slots and phases
 * are those of phase_board.py, with the same promise: a rank that publishes phase p has read all
 * slots up to phase p - LAG. This code decides nothing. If a step cannot be taken, or another rank
 * is in another call, it returns the step. Python then waits, checks that the others are alive, and
 * raises errors.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000 /* one build for Python 3.11 and all later versions */
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define VERSION 4 /* see native.py */
#define MAX_RANKS 64
#define CACHE_LINE_BYTES 64
#define TESTS_PER_CLOCK 64 /* tests of a condition between two readings of the clock */
#define GIL_BYTES 32768    /* up to here, to release the interpreter's lock costs more */

/* The code of a call. A broadcast has the code BROADCAST + root. */
enum { FLOAT_SUM, FLOAT_MEAN, DOUBLE_SUM, DOUBLE_MEAN, BROADCAST };

/* Whom a step waits for: all ranks in any call, all in this call, or the root in this call. */
enum { ANY_CALL, SAME_CALL, ROOT_IN_SAME_CALL };

typedef struct {
    PyObject_HEAD
    int rank, size;
    int yields; /* give the processor to other processes in a wait */
    /* The layout of phase_board.py: indices of words, and sizes. */
    int64_t phase_at, sleeps_at, ring_at, ring, slots, slot_bytes, max_phases_ahead;
    int64_t slice_bytes, one_pass_bytes; /* the same on all ranks */
    int64_t spin_ns;
    int64_t *words[MAX_RANKS];    /* the words of each rank; only those of this rank are written */
    char *slot_memory[MAX_RANKS]; /* the slots of each rank */
    int64_t awaited_phase;        /* the phase of others that the next step needs */
    int same_call;                /* must they be in this call there? */
} NativeAllReduce;

/* One call that is not complete. */
typedef struct {
    char *tensor; /* of this rank: input and output */
    int64_t bytes, word, first, slices;
    int code, passes;
    int root; /* of a broadcast, else -1 */
} Call;

/* --- reductions */

#define REDUCTION(real)                                                                            \
    static void reduce_##real(real *out, char *const *terms, int size, int mean, int64_t n) {      \
        for (int r = 1; r < size; r++) {                                                           \
            const real *a = r == 1 ? (const real *)terms[0] : out, *b = (const real *)terms[r];    \
            for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                  \
        }                                                                                          \
        for (int64_t i = 0; mean && i < n; i++) out[i] /= (real)size;                              \
    }

REDUCTION(float)
REDUCTION(double)

/* out = terms[0] + terms[1] + ... in this order. It may be one of the first two terms, but no later
 * one. */
static void reduce(const NativeAllReduce *self, const Call *call, char *out, char *const *terms,
                   int64_t bytes) {
    int mean = call->code == FLOAT_MEAN || call->code == DOUBLE_MEAN;
    if (call->code <= FLOAT_MEAN)
        reduce_float((float *)out, terms, self->size, mean, bytes / (int64_t)sizeof(float));
    else
        reduce_double((double *)out, terms, self->size, mean, bytes / (int64_t)sizeof(double));
}

/* --- the phase board */

/* Have all others published this phase? */
static int all_at_phase(const NativeAllReduce *self, int64_t phase) {
    for (int r = 0; r < self->size; r++) {
        if (r == self->rank) continue;
        if (__atomic_load_n(&self->words[r][self->phase_at], __ATOMIC_ACQUIRE) < phase) return 0;
    }
    return 1;
}

/* Have all others published this phase in this call? */
static int all_reached(const NativeAllReduce *self, int64_t phase, int64_t word) {
    if (!all_at_phase(self, phase)) return 0;
    for (int r = 0; r < self->size; r++)
        if (r != self->rank && self->words[r][self->ring_at + phase % self->ring] != word) return 0;
    return 1;
}

/* Has the root published this phase in this call? */
static int root_reached(const NativeAllReduce *self, const Call *call, int64_t phase) {
    int64_t *words = self->words[call->root];
    if (__atomic_load_n(&words[self->phase_at], __ATOMIC_ACQUIRE) < phase) return 0;
    return words[self->ring_at + phase % self->ring] == call->word;
}

static void publish(const NativeAllReduce *self, int64_t phase, int64_t word) {
    int64_t *self_words = self->words[self->rank];
    self_words[self->ring_at + phase % self->ring] = word;
    __atomic_store_n(&self_words[self->phase_at], phase, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#ifdef __linux__
    for (int r = 0; r < self->size; r++) {
        if (r == self->rank) continue;
        if (__atomic_load_n(&self->words[r][self->sleeps_at], __ATOMIC_RELAXED)) {
            syscall(SYS_futex, &self_words[self->phase_at], FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
            return;
        }
    }
#endif
}

static char *slot(const NativeAllReduce *self, int rank, int64_t phase) {
    return self->slot_memory[rank] + phase % self->slots * self->slot_bytes;
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static char *slice_start(const NativeAllReduce *self, const Call *call, int64_t slice) {
    return call->tensor + slice * self->slice_bytes;
}

static int64_t slice_length(const NativeAllReduce *self, const Call *call, int64_t slice) {
    return min64(self->slice_bytes, call->bytes - slice * self->slice_bytes);
}

/* The byte of a slice at which a rank's piece starts. The piece ends where the next one starts. */
static int64_t piece_start(const NativeAllReduce *self, int rank, int64_t bytes) {
    int64_t share = (bytes + self->size - 1) / self->size;
    int64_t lines = (share + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES;
    return min64(bytes, lines * CACHE_LINE_BYTES * rank);
}

/* --- steps */

/* The phase in which a slice is written. */
static int64_t write_phase(const Call *call, int64_t slice) {
    return call->first + (call->passes == 1 ? slice : slice ? 2 * slice - 1 : 0);
}

/* The phase in which its reduced pieces are written. */
static int64_t reduce_phase(const Call *call, int64_t slice) {
    return call->first + (slice < call->slices - 1 ? 2 * slice + 2 : 2 * call->slices - 1);
}

static void write_slice(const NativeAllReduce *self, const Call *call, int64_t slice) {
    char *from = slice_start(self, call, slice);
    char *to = slot(self, self->rank, write_phase(call, slice));
    int64_t bytes = slice_length(self, call, slice), begin = bytes, end = bytes;
    if (call->root >= 0 && call->root != self->rank) begin = end = bytes = 0;
    if (call->passes == 2) { /* no other rank reads the piece that this rank reduces */
        begin = piece_start(self, self->rank, bytes);
        end = piece_start(self, self->rank + 1, bytes);
    }
    memcpy(to, from, begin);
    memcpy(to + end, from + end, bytes - end);
    publish(self, write_phase(call, slice), call->word);
}

/* Ranks 0 and 1 read their values from the tensor itself, because these are the first two terms. */
static void reduce_slice(const NativeAllReduce *self, const Call *call, int64_t slice) {
    char *out = slice_start(self, call, slice), *terms[MAX_RANKS];
    for (int r = 0; r < self->size; r++)
        terms[r] = r == self->rank && r < 2 ? out : slot(self, r, write_phase(call, slice));
    reduce(self, call, out, terms, slice_length(self, call, slice));
}

static void reduce_piece(const NativeAllReduce *self, const Call *call, int64_t slice) {
    int64_t bytes = slice_length(self, call, slice);
    int64_t begin = piece_start(self, self->rank, bytes);
    int64_t end = piece_start(self, self->rank + 1, bytes);
    char *own = slice_start(self, call, slice) + begin;
    char *out = slot(self, self->rank, reduce_phase(call, slice)) + begin;
    char *terms[MAX_RANKS];
    for (int r = 0; r < self->size; r++)
        terms[r] = r == self->rank ? own : slot(self, r, write_phase(call, slice)) + begin;
    reduce(self, call, out, terms, end - begin);
    memcpy(own, out, end - begin);
    publish(self, reduce_phase(call, slice), call->word);
}

static void read_pieces(const NativeAllReduce *self, const Call *call, int64_t slice) {
    char *out = slice_start(self, call, slice);
    int64_t bytes = slice_length(self, call, slice);
    for (int r = 0; r < self->size; r++) {
        int64_t begin = piece_start(self, r, bytes), end = piece_start(self, r + 1, bytes);
        char *from = slot(self, r, reduce_phase(call, slice));
        if (r != self->rank) memcpy(out + begin, from + begin, end - begin);
    }
}

/* The other ranks read a slice of a broadcast's root. All ranks compare their calls before the
 * first one, the root too: a rank with another root would go on with other values. */
static void read_slice(const NativeAllReduce *self, const Call *call, int64_t slice) {
    if (self->rank != call->root)
        memcpy(slice_start(self, call, slice), slot(self, call->root, write_phase(call, slice)),
               slice_length(self, call, slice));
}

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int is_reached(const NativeAllReduce *self, const Call *call) {
    if (self->same_call == SAME_CALL) return all_reached(self, self->awaited_phase, call->word);
    if (self->same_call) return root_reached(self, call, self->awaited_phase);
    return all_at_phase(self, self->awaited_phase);
}

/* Test whether all others have reached a phase, and spin for a moment until they have. */
static int wait_for(NativeAllReduce *self, const Call *call, int64_t phase, int same_call) {
    self->awaited_phase = phase;
    self->same_call = same_call;
    if (is_reached(self, call)) return 1;
    for (int64_t end = clock_ns() + self->spin_ns; clock_ns() < end;) {
        for (int test = 0; test < TESTS_PER_CLOCK; test++)
            if (is_reached(self, call)) return 1;
        if (self->yields) sched_yield();
    }
    return 0;
}

/* Take one step if possible. A turn has three: write a slice, read reduced pieces, and reduce. */
static int take_step(NativeAllReduce *self, const Call *call, int64_t step) {
    int64_t turn = step / 3, slices = call->slices;
    switch (step % 3) {
    case 0:
        if (turn >= slices) return 1;
        if (!wait_for(self, call, write_phase(call, turn) - self->max_phases_ahead, ANY_CALL)) return 0;
        write_slice(self, call, turn);
        return 1;
    case 1:
        if (call->passes == 1 || turn < 2) return 1;
        if (!wait_for(self, call, reduce_phase(call, turn - 2), SAME_CALL)) return 0;
        read_pieces(self, call, turn - 2);
        return 1;
    default:
        if (turn < 1 || turn > slices) return 1;
        if (call->root >= 0 && turn > 1) {
            if (self->rank == call->root) return 1;
            if (!wait_for(self, call, write_phase(call, turn - 1), ROOT_IN_SAME_CALL)) return 0;
        } else if (!wait_for(self, call, write_phase(call, turn - 1), SAME_CALL)) {
            return 0;
        }
        if (call->root >= 0) {
            read_slice(self, call, turn - 1);
            return 1;
        }
        if (call->passes == 1) {
            reduce_slice(self, call, turn - 1);
            return 1;
        }
        if (!wait_for(self, call, reduce_phase(call, turn - 1) - self->max_phases_ahead, ANY_CALL))
            return 0;
        reduce_piece(self, call, turn - 1);
        return 1;
    }
}

/* Take steps until one is not possible. Return that step; -1 after the last. */
static int64_t take_steps(NativeAllReduce *self, const Call *call, int64_t step) {
    int64_t steps = 3 * (call->slices + call->passes);
    while (step < steps && take_step(self, call, step)) step++;
    return step < steps ? step : -1;
}

/* --- the Python type */

PyDoc_STRVAR(advance_doc,
             "advance(address, bytes, code, word, first, step) -> step\n\n"
             "Take the steps of an all-reduce or a broadcast of the tensor at `address`, whose\n"
             "first phase is `first`, from `step` on. Return the first step that cannot be taken, not even after\n"
             "a short spin; -1 if all are taken.");

static PyObject *advance(NativeAllReduce *self, PyObject *const *args, Py_ssize_t count) {
    int64_t values[6];
    if (count != 6) return PyErr_Format(PyExc_TypeError, "advance takes 6 numbers, not %zd", count);
    for (int i = 0; i < 6; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return NULL;
    }
    int64_t bytes = values[1], code = values[2], step = values[5];
    if (bytes < 0 || (bytes && !values[0]) || code < 0 || code >= BROADCAST + self->size ||
        step < 0)
        return PyErr_Format(PyExc_ValueError,
                            "no all-reduce has %lld bytes at %lld, code %lld and a step %lld",
                            (long long)bytes, (long long)values[0], (long long)code,
                            (long long)step);
    int root = code >= BROADCAST ? (int)code - BROADCAST : -1;
    Call call = {.tensor = (char *)(intptr_t)values[0],
                 .bytes = bytes,
                 .code = (int)code,
                 .word = values[3],
                 .first = values[4],
                 .slices = bytes ? (bytes + self->slice_bytes - 1) / self->slice_bytes : 1,
                 .passes = root < 0 && bytes > self->one_pass_bytes ? 2 : 1,
                 .root = root};
    if (bytes <= GIL_BYTES) return PyLong_FromLongLong(take_steps(self, &call, step));
    Py_BEGIN_ALLOW_THREADS
    step = take_steps(self, &call, step);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(step);
}

static int addresses(PyObject *list, int size, void **out) {
    for (int r = 0; r < size; r++) {
        PyObject *item = PySequence_GetItem(list, r);
        out[r] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static int init(NativeAllReduce *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank",    "words",   "slots",  "layout",
                            "slicing", "spin_ns", "yields", NULL};
    PyObject *words, *slots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOO(LLLLLLL)(LL)Li", names, &self->rank, &words,
                                     &slots, &self->phase_at, &self->sleeps_at, &self->ring_at,
                                     &self->ring, &self->slots, &self->slot_bytes,
                                     &self->max_phases_ahead, &self->slice_bytes,
                                     &self->one_pass_bytes, &self->spin_ns, &self->yields))
        return -1;
    Py_ssize_t size = PySequence_Size(words);
    if (size < 2 || size > MAX_RANKS || PySequence_Size(slots) != size || self->rank < 0 ||
        self->rank >= size || self->slice_bytes < CACHE_LINE_BYTES ||
        self->slice_bytes % CACHE_LINE_BYTES || self->slice_bytes > self->slot_bytes) {
        PyErr_Format(PyExc_ValueError,
                     "2 to %d ranks meet here, with slices of whole cache lines that fit a slot",
                     MAX_RANKS);
        return -1;
    }
    self->size = (int)size;
    if (addresses(words, self->size, (void **)self->words)) return -1;
    return addresses(slots, self->size, (void **)self->slot_memory);
}

static PyMethodDef methods[] = {
    {"advance", (PyCFunction)(void (*)(void))advance, METH_FASTCALL, advance_doc},
    {NULL},
};

static PyMemberDef members[] = {
    {"awaited_phase", T_LONGLONG, offsetof(NativeAllReduce, awaited_phase), READONLY,
     "the phase that the step which could not be taken needs"},
    {"same_call", T_INT, offsetof(NativeAllReduce, same_call), READONLY,
     "1 if all ranks must be in this call there, 2 if only the root must, else 0"},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The all-reduces of one rank in one group. The memory must outlive it."},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_init, init},
    {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};

static PyType_Spec spec = {"shoal.shm_backend._native.NativeAllReduce", sizeof(NativeAllReduce), 0,
                           Py_TPFLAGS_DEFAULT, slots};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made && (!type || PyModule_AddType(made, (PyTypeObject *)type) < 0 ||
                 PyModule_AddIntConstant(made, "VERSION", VERSION) < 0)) {
        Py_DECREF(made);
        made = NULL;
    }
    Py_XDECREF(type);
    return made;
}

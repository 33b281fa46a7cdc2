/* The steps of compiled calls (native.c), as whole calls (compiled_calls.c) use them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define VERSION 3 /* see native.py */
#define MAX_RANKS 64

/* The code of a call. A broadcast has the code BROADCAST + root. */
enum { FLOAT_SUM, FLOAT_MEAN, DOUBLE_SUM, DOUBLE_MEAN, BROADCAST };

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

extern PyTypeObject NativeAllReduceType, CompiledCallsType;

/* Take the steps of a call whose first phase is `first`, from `step` on. Return the first step that
 * cannot be taken, not even after a short spin; -1 if all are taken. */
int64_t take_call_steps(NativeAllReduce *self, char *tensor, int64_t bytes, int code, int64_t word,
                        int64_t first, int64_t step);

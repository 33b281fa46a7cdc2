"""The proof of a script: a user's own loop, unchanged, on many ranks and in one process.

    script.py on n ranks ── recorder ── record ─┐
                                                 ├── compare_runs ── the first difference, its cause
    script.py alone      ── recorder ── record ─┘

- `script_recorder`, `loader_batches` and `module_calls` watch the script from outside;
- `same_start` lets it compute in float64, and one process begin as the ranks do;
- `run_record` is the record, in JSON and safetensors;
- `step_comparison` joins what ranks hold into the tensors of one process;
- it and `run_comparison` find the first difference, `likely_cause` names its class;
- `script_verdict` has the function that a user calls.
"""

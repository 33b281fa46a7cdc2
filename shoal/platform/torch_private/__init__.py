"""Every use of torch's private names, which begin with an underscore and may change at any time.

Each has a reason why no public name does, what is lost without it, and the versions that its check
in tests/platform/test_torch_private.py was run on. Nothing else in Shoal uses such a name; a test
holds that. An upgrade of torch begins here: change the version, run the test, and mend what it
names.

    tensor_state        versions, views and hooks of tensors, and of operators
    module_state        the tables in which nn.Module keeps parameters, buffers and hooks
    subclasses          making tensor subclasses; modes, profilers, fake tensors
    pytree              nests of tensors
    replaced_functions  functions that are replaced while models are prepared
    data_workers        the view that a data set has of its process
    kernels             functions over lists of tensors, and a softmax
    c10d                process groups and stores
    fsdp                FSDP2's forward pass, and shards of slices
    pipelining          the first half of a backward pass

Aliases are used where a call is hot: they cost nothing. Modules that take long to import are
imported where they are called.
"""

DYNAMO = "torch._dynamo"
"""Imported by the first optimizer and by DistributedDataParallel, and as slow as the rest of torch.

Why: a fork server imports it once for all ranks; torch.compiler, its public face, does not import
it. Without: every rank starts seconds later. Checked: 2.11, 2.13, 2.15.
"""

"""All-reduce by algorithms that can be read, each one small file over messages between two ranks.

    M bytes, n ranks    one after the other      sent by the busiest rank    bits of a sum depend on its place
    ring                2 (n - 1) messages       2 (n - 1)/n M               from 3 ranks on
    tree                2 log2(n)                log2(n) M                   no
    halving_doubling    2 log2(n)                2 (n - 1)/n M               no
    hierarchical        a ring of hosts' leaders, shared memory inside hosts from 3 hosts on

    pairs.py ── ring, tree, halving_doubling, hierarchical ── all_reduce.py ── DistributedDataParallel's buckets

Whatever the algorithm, all ranks end with the same bits: each number is summed on one rank, or in
the same pairs on all. With halving_doubling, where n is no power of two, some ranks send M more.
"""

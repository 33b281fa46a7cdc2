"""Algorithms of all-reduce, each in a small file that uses only messages between two ranks.

    M bytes, n ranks    messages in sequence   sent by the busiest rank   bits depend on position
    ring                2 (n - 1)              2 (n - 1)/n M              from 3 ranks on
    tree                2 log2(n)              log2(n) M                  no
    hierarchical        shared memory inside hosts,                       from 3 hosts on
                        a ring of the hosts' leaders

    send_recv.py ── ring, tree, hierarchical ── NamedMean ── buckets of DDP

With every algorithm, all ranks end with the same bits: each element is summed on one rank.
"""

"""`python -m shoal` is `shoal`; `torchrun -m shoal train digits` needs it."""

import sys

if sys.argv[1:] == ["agent"]:  # without the imports of other verbs: a hundred may start at once
    from shoal.launch.hosts.agent_process import run_agent

    run_agent()
else:
    from shoal.cli import main

    main()

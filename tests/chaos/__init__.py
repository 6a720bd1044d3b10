"""Kill and stop all that a bulk run is made of, at random, until it is done; then look for a row lost or doubled.

    make chaos                                     20 runs with the fake engine, 2 with the real one, and the faults
    CHAOS_SEED=7 CHAOS_RUNS=100 make chaos         another schedule, a longer one
    CHAOS_EVERY=5 make chaos                       drivers are stopped at each fifth step only
    python -m tests.chaos --help                   the same, as flags

    schedule.py    what is killed when: a pure function of the seed
    processes.py   who is who among the processes of a run
    ray_nodes.py   a Ray cluster of several nodes on this machine, whose nodes can be lost
    driver.py      `peagle generate` as a process, and the corpus that it reads
    play.py        one run: started, killed, continued with the same command until it is done
    audit.py       what has to be true of a run directory afterwards
    faults.py      faults that kill nobody: full disk, read-only output, two drivers, a jumping clock
    pauses.py      drivers that are stopped at each durable step, while another one does all the work
    stepping.py    what a step is, and a driver without Ray that stops at some
    report.py      the report under benchmarks/reliability/

It is no part of `make test`; `tests/integration/test_chaos.py` plays one short run of it there, and
`tests/unit/chaos/test_pauses.py` some steps.
"""

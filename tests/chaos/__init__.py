"""Kill and stop processes of bulk runs at random, continue the runs, and check that no row is lost or duplicated.

    make chaos                                     20 runs with the fake engine, 2 with the real one, and the faults
    CHAOS_SEED=7 CHAOS_RUNS=100 make chaos         another, longer schedule
    CHAOS_EVERY=5 make chaos                       pause drivers only at every fifth durable step
    python -m tests.chaos --help                   the same, as flags

    schedule.py    the schedule of kills, a function of the seed
    processes.py   the processes of a run
    ray_nodes.py   a Ray cluster of several nodes on this machine
    driver.py      `peagle generate` as a process, and its corpus
    play.py        one run: started, killed, continued with the same command until it is done
    audit.py       checks of the finished run directory
    faults.py      faults without kills: full disk, read-only output, two drivers, clock jumps
    pauses.py      drivers that pause at each durable step while another driver finishes the run
    stepping.py    a driver without Ray that pauses at durable steps (writes that survive a crash)
    report.py      the report under benchmarks/reliability/

`make test` pauses drivers at only a few durable steps, in `tests/integration/test_chaos.py`.
"""

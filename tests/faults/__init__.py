"""Kill the processes of the endpoint under load, one after another, and count the outcomes; then overload it.

    make faults                        everything with the fake engine; writes a report under benchmarks/online/
    python -m tests.faults --help      options for shorter runs, other loads and single faults

    endpoint.py    `peagle serve --engine fake` as a process, and its parts
    clients.py     clients that send one request after another and record the outcomes
    arrivals.py    an overload: requests at a fixed rate, independent of the answers
    scenes.py      one fault: load, the kill, more load, checks of the ledger and the slots
    report.py      the report, as Markdown and JSON

`make test` does not run it.
"""

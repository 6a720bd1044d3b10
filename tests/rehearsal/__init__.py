"""The GPU configuration, rehearsed on a machine without a GPU.

    make rehearsal                              # the full grid; writes docs/rehearsal.md
    python -m tests.rehearsal --cards H100 L4   # some cards, to the terminal

Every model of the catalog with P-EAGLE, EAGLE-3 and no drafter, on every card, for 1 to 256 requests at once: our own
`resolve` decides, and vLLM's `create_engine_config` takes what it decided. vLLM's own code then says which attention
back ends and CUDA graphs that makes, and how much KV cache a request needs. Nothing is computed, and nothing is
measured.

    cards.py     what is known of the cards
    shapes.py    config.json of the models and heads, in a cache of Hugging Face's client
    pretend.py   makes vLLM believe in a card; it spoils the process, so each card has its own
    cell.py      one model, drafter and number of requests on the card of the process
    queued.py    the commands of benchmarks/GPU_QUEUE.md
    table.py     the page
"""

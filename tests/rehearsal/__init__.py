"""The GPU configurations, checked on a machine without a GPU.

    make rehearsal                              # the full grid; writes benchmarks/rehearsal.md
    python -m tests.rehearsal --cards H100 L4   # some cards, to the terminal

Every model of the catalog with P-EAGLE, EAGLE-3 and no drafter, on every card, for 1 to 256 concurrent requests: our
own `resolve` decides, and vLLM's `create_engine_config` accepts or refuses the result. vLLM's own code then says which
attention back ends and CUDA graphs this gives, and how much KV cache a request needs. Nothing is computed or measured.

    cards.py     the cards
    shapes.py    config.json of the models and heads, in a cache of Hugging Face's client
    pretend.py   makes vLLM believe in a card; the process is unusable afterwards, so each card has its own
    cell.py      one model, drafter and number of requests on the card of the process
    queued.py    the commands of benchmarks/GPU_QUEUE.md
    table.py     the page
"""

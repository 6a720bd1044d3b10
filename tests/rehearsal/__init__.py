"""Check the GPU configurations on a machine without a GPU.

    make rehearsal                              # the full grid; writes benchmarks/rehearsal.md
    python -m tests.rehearsal --cards H100 L4   # some cards, to the terminal

The grid has every model of the catalog with P-EAGLE, EAGLE-3 and no drafter, on every card, for 1 to 256 concurrent
requests. Peagle's own `resolve` chooses the configuration, and vLLM's `create_engine_config` accepts or refuses it.
vLLM's own code then says which attention back ends and CUDA graphs it would use, and how much KV cache a request needs.
No model is run and nothing is measured.

    cards.py     the cards
    shapes.py    writes the config.json of the models and heads into a Hugging Face cache
    imitated_card.py
                 makes vLLM believe that it runs on a card; each card has its own process, which is unusable afterwards
    cell.py      one cell: a model, a drafter and a number of requests on the card of the process
    queued.py    the commands of benchmarks/GPU_QUEUE.md
    table.py     writes the page
    child.py     the process of a card
"""

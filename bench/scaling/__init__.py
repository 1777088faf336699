"""How a cast and its replies grow with hosts: a model, what it is made of, and what checks it.

    python -m bench.scaling measure     the costs of this machine, then real casts beside the prediction (minutes)
    python -m bench.scaling sizes       what a process costs its owner and the machine, up to 512 of them (4 GB)
    python -m bench.scaling simulate    simulated casts beside the prediction (minutes, gigabytes)
    python -m bench.scaling render      data.json into the tables of README.md and scaling.svg

The first three write bench/scaling/data.json. bench/scaling/README.md explains all of it.
"""

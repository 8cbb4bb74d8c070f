"""What `make test-quick` runs of the Python tests: some of every front, in about a minute.

With the C++ tests that is under three minutes on two cores. Chosen by the seconds that tests take by themselves.
"""

from __future__ import annotations

# File -> its tests that run, None for all; tests marked as slow never do.
QUICK: dict[str, tuple[str, ...] | None] = {
    # plain tensors on one rank: arguments, masks, maps, plans, every feature in every layout, schedule and dtype
    "python/test_bad_input.py": None,
    "python/test_masks.py": None,
    "python/test_oracle.py": None,
    "python/test_plan.py": None,
    "python/test_shard_map.py": None,
    "python/test_support.py": None,
    "python/test_one_way_in.py": None,
    "python/test_device.py": ("test_maps_of_one_rank",),
    # over process groups, in one pool: plain tensors, agreement, DTensors, SDPA
    "multiproc/test_ring.py": (
        "test_all_to_all_counts",
        "test_a17_other_strides_on_each_rank",
        "test_a25_repeats_are_equal_bit_by_bit",
        "test_groups_and_meshes",
        "test_unshard_gradients",
        "test_every_rank_sees_all",
    ),
    "multiproc/test_agreement.py": ("test_one_rank_makes_another_call", "test_unshard_agrees_too"),
    "multiproc/test_dtensor.py": ("test_the_map_that_is_enabled", "test_other_placements_are_redistributed"),
    "multiproc/test_sdpa.py": ("test_what_sdpa_takes",),
    # the contract's ops, FlexAttention, transformers
    "python/test_npu_ops.py": None,
    "python/test_npu_rejections.py": None,
    "python/test_flex.py": ("test_attention_under_masks",),
    "python/test_flex_refusals.py": None,
    "python/test_hf_layers.py": None,
    # the command line, the benchmark's and the report's files, pages, and how the sources are put together
    "python/test_cli.py": ("test_verify_holds", "test_plan_json_is_one_document_with_every_rank"),
    "python/test_benchmark_schema.py": None,
    "python/test_imports.py": None,
    "python/test_duplicates.py": None,
    "docs/test_faults_page.py": None,
    "docs/test_snippets.py": None,
}

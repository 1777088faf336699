"""Operations of ours on the ranks."""

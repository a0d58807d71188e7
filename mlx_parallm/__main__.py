"""`python -m mlx_parallm`."""

from mlx_parallm.cli import main

raise SystemExit(main())

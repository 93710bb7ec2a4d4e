"""Makes `scripts` importable without the repository's root on the path (its folder `kernels` hides another package)."""

import sys
import types
from pathlib import Path

package = types.ModuleType("scripts")
package.__path__ = [str(Path(__file__).parents[2] / "scripts")]
sys.modules["scripts"] = package

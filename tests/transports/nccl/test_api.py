from __future__ import annotations

from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES, Comm, CupyNccl, NcclApi
from harness.cupy_double import CupyDouble


def test_the_adapter_fits_the_seam() -> None:
    nccl: NcclApi = CupyNccl(CupyDouble().nccl)
    comm: Comm = nccl.open_comm(2, bytes(UNIQUE_ID_NBYTES), 0)
    comm.destroy()

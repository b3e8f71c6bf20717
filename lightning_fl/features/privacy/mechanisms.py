"""Choice of a run's privacy mechanism from its settings."""

from __future__ import annotations

import numpy as np

from lightning_fl.features.privacy.central import CentralMechanism
from lightning_fl.features.privacy.client_privacy import ClientPrivacy
from lightning_fl.features.privacy.local_privacy import LocalMechanism, LocalPrivacy
from lightning_fl.features.privacy.mechanism import Mechanism, Privacy


def mechanism_of(privacy: Privacy | None, client_sizes: np.ndarray, cohort_size: int) -> Mechanism:
    """Return the mechanism of a run; for None one that changes nothing.

    Args:
        privacy: settings of the user.
        client_sizes: number of samples of each client.
        cohort_size: clients of a round, K.

    Raises:
        UserError: the settings do not fit the federation.
    """
    if isinstance(privacy, ClientPrivacy):
        return CentralMechanism.of(privacy, client_sizes, cohort_size)
    if isinstance(privacy, LocalPrivacy):
        return LocalMechanism.of(privacy)
    return Mechanism()
